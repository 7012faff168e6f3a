"""The configurations of nginx and HAProxy in docs/scale.md are whole, and these programs take them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"^```(nginx|haproxy)\n(.*?)^```", (ROOT / "docs" / "scale.md").read_text(), re.DOTALL | re.MULTILINE
)
NGINX = [text for kind, text in BLOCKS if kind == "nginx"]
(HAPROXY,) = [text for kind, text in BLOCKS if kind == "haproxy"]
MAIN = "pid {path}/pid; error_log {path}/error.log; events {{}} http {{ access_log off; {paths} {text} }}"


def test_what_a_proxy_must_be_told() -> None:
    """nginx does not start without a certificate; HAProxy takes sessions apart only in the mode http."""
    assert len(NGINX) == 2 and "ssl_certificate " in NGINX[0] and "ssl_certificate_key " in NGINX[0]
    assert '"" $request_id' in NGINX[1], "else requests without a session all go to one replica"
    assert HAPROXY.startswith("defaults\n    mode http\n") and "bind " in HAPROXY and "timeout server" in HAPROXY


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("replicas", [False, True])
def test_nginx_takes_its_file(replicas: bool, tmp_path: Path) -> None:
    text = NGINX[0] if not replicas else NGINX[1] + NGINX[0][NGINX[0].index("server {") :]
    # A certificate would be read: without one, the rest is checked.
    text = re.sub(r"ssl_certificate\S* \S+;", "", text.replace("listen 443 ssl;", "listen 127.0.0.1:8443;"))
    places = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{name}_temp_path {tmp_path}/{name};" for name in places)
    file = tmp_path / "nginx.conf"
    file.write_text(MAIN.format(path=tmp_path, paths=paths, text=text))
    found = subprocess.run(
        ["nginx", "-t", "-p", str(tmp_path), "-c", str(file)], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and "warn" not in found.stderr, found.stderr


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="HAProxy is not installed")
def test_haproxy_takes_its_file(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(HAPROXY)
    found = subprocess.run(["haproxy", "-c", "-f", str(file)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and "WARNING" not in found.stderr, found.stderr
