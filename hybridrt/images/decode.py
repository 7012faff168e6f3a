"""Decodes a picture with Pillow, in a child process."""

import io
import warnings
from hashlib import sha256

import numpy as np
from PIL import Image, ImageFile, ImageOps

from hybridrt.images.jobs import UnreadablePicture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
WHITE = (255, 255, 255, 255)


def decode(data: bytes, max_pixels: int) -> np.ndarray:
    """[h, w, 3] uint8: the first frame, upright, transparent parts on white.

    Raises:
        UnreadablePicture: the bytes are no picture of FORMATS, are broken, or it has more than
            `max_pixels` pixels.
        MemoryError: decoding needs too much.
    """
    if not data:
        raise UnreadablePicture("it is empty")
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = None  # check_sides follows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_sides(*image.size, max_pixels)
                Image.MAX_IMAGE_PIXELS = max_pixels // 2  # raises at twice as many: frames of a GIF may be larger
                image.load()
                check_sides(*image.size, max_pixels)
                return pixels_of(image)
        except Image.UnidentifiedImageError as e:
            raise UnreadablePicture(f"it is no image of the formats {', '.join(FORMATS)}, or a broken one") from e
        except Image.DecompressionBombError as e:
            raise UnreadablePicture(f"it has more than {max_pixels} pixels") from e
        except (MemoryError, UnreadablePicture):
            raise
        except Exception as e:  # of any type
            raise UnreadablePicture(f"it is broken or truncated ({type(e).__name__}: {str(e)[:200]})") from e


def digest_of(pixels: np.ndarray) -> bytes:
    """32 bytes, a hash of [h, w, 3] uint8 pixels and their sides."""
    hashed = sha256(f"{pixels.shape} ".encode())
    hashed.update(np.ascontiguousarray(pixels).data)
    return hashed.digest()


def check_sides(width: int, height: int, max_pixels: int) -> None:
    """Raises UnreadablePicture."""
    if width < 1 or height < 1:
        raise UnreadablePicture(f"its size is {width} x {height} pixels")
    if width * height > max_pixels:
        raise UnreadablePicture(f"it is too large: {width} x {height} pixels, more than {max_pixels} in all")


def pixels_of(image: Image.Image) -> np.ndarray:
    """[h, w, 3] uint8 of an opened picture. Raises what Pillow raises."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would cut values at 255
        upper = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(upper[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise UnreadablePicture(f"its pixels are numbers of 32 bits (mode {image.mode}); pass 8 or 16 bits")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return np.array(image.convert("RGB"))  # contiguous
