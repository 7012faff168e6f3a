"""Pictures made of a seed, in the formats that files have."""

import io

import numpy as np
from PIL import Image


def noise(seed: int, width: int, height: int) -> np.ndarray:
    """[height, width, 3] uint8: noise over gradients."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    wave = 127 + 90 * np.sin(np.stack([x / 7 + y / 13, x / 11 - y / 5, x / 3 + y / 17], -1) + random.uniform(0, 6, 3))
    return np.clip(wave + random.normal(0, 12, wave.shape), 0, 255).astype(np.uint8)


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(seed: int, width: int, height: int) -> bytes:
    return saved(Image.fromarray(noise(seed, width, height)), "PNG")
