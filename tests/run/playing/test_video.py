from __future__ import annotations

import builtins
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError, MissingExtraError, PenstockError
from penstock.run.playing import video
from penstock.run.playing.video import VideoWriter


def frame(i: int, height: int = 48, width: int = 64) -> np.ndarray:
    x = np.zeros((height, width, 3), np.uint8)
    x[..., 0], x[: height // 2, :, 1] = 20 * i, 200
    return x


def decode(path: Path, height: int, width: int) -> np.ndarray:
    """[N, H, W, 3] frames as ffmpeg reads them back."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    program = imageio_ffmpeg.get_ffmpeg_exe()
    command = [program, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, timeout=200, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


@pytest.mark.parametrize(("size", "even"), [((48, 64), (48, 64)), ((47, 63), (48, 64))])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_frames_come_back(tmp_path: Path, size: tuple[int, int], even: tuple[int, int], suffix: str) -> None:
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "videos" / f"a{suffix}"
    with VideoWriter(path, 30, size) as writer:
        for i in range(10):
            writer.write(frame(i, *size))
        assert not path.exists()
    back = decode(path, *even)
    assert len(back) == 10
    for i in range(10):
        error = np.abs(back[i, : size[0], : size[1]].astype(int) - frame(i, *size))
        assert error.mean() < 8
    assert os.listdir(path.parent) == [path.name]


def test_the_rate_is_that_of_the_environment(tmp_path: Path) -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    with VideoWriter(tmp_path / "a.mp4", 12, (48, 64)) as writer:
        for i in range(24):
            writer.write(frame(i % 10))
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(tmp_path / "a.mp4")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False).stderr
    assert "12 fps" in said
    assert "Duration: 00:00:02.00" in said
    assert re.search(r"h264.*yuv420p.*64x48", said)


def test_views_that_are_not_contiguous_are_written_as_they_look(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with VideoWriter(tmp_path / "a.mp4", 5, (48, 64)) as writer:
        writer.write(frame(0)[::-1])
    assert decode(tmp_path / "a.mp4", 48, 64)[0, -1, :, 1].mean() > 150


def test_wrong_frames_and_settings_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(ConfigError, match=r"ends in \.mp4"):
        VideoWriter(tmp_path / "a.avi", 30, (4, 4))
    with pytest.raises(ConfigError, match="expected positive numbers"):
        VideoWriter(tmp_path / "a.mp4", 0, (4, 4))
    with VideoWriter(tmp_path / "a.mp4", 30, (48, 64)) as writer:
        writer.write(frame(0))
        for wrong in (frame(0).astype(np.float32), frame(0, 64, 48), frame(0)[..., 0]):
            with pytest.raises(ConfigError, match=r"expected uint8 \(48, 64, 3\)"):
                writer.write(wrong)
    with pytest.raises(PenstockError, match="is closed"):
        writer.write(frame(0))
    writer.close()


def test_a_failure_ends_with_what_ffmpeg_said(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / f".a.tmp-{os.getpid()}.mp4").mkdir()
    writer = VideoWriter(tmp_path / "a.mp4", 30, (48, 64))

    def write_and_close() -> None:
        writer.write(frame(0))
        writer.close()

    with pytest.raises(PenstockError, match=r"could not write .*a\.mp4: .*it said: .*Is a directory"):
        write_and_close()
    assert not (tmp_path / "a.mp4").exists()
    assert writer._process is None


def test_a_video_without_frames_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(PenstockError, match="no frame was written"):
        VideoWriter(tmp_path / "a.mp4", 30, (48, 64)).close()
    assert os.listdir(tmp_path) == []


def test_a_program_that_dies_midway_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\necho 'encoder on fire' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(video, "require_ffmpeg", lambda: str(program))
    writer = VideoWriter(tmp_path / "a.mp4", 30, (48, 64))

    def write_and_close() -> None:
        for _ in range(1000):
            writer.write(frame(0))
        writer.close()

    with pytest.raises(PenstockError, match=r"said: encoder on fire"):
        write_and_close()
    assert os.listdir(tmp_path) == ["ffmpeg"]


def test_an_error_between_frames_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    writer = VideoWriter(tmp_path / "a.mp4", 30, (48, 64))
    process = writer._process
    assert process is not None

    def fail() -> None:
        with writer:
            writer.write(frame(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert process.returncode is not None
    assert os.listdir(tmp_path) == []


def test_without_the_extra_the_error_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name == "imageio_ffmpeg":
            raise ImportError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[video\]'"):
        VideoWriter(tmp_path / "a.mp4", 30, (4, 4))
