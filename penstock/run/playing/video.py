"""Video files, written frame by frame through the ffmpeg program of the extra `video`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError, MissingExtraError, PenstockError

_SUFFIXES = (".mp4", ".mkv", ".mov")
_CLOSE_S = 120.0
_STDERR_TAIL = 2000


class VideoWriter:
    """Streams frames to an H.264 file that every browser plays; the file gets its name once it is whole.

    Args:
        path: ends in .mp4, .mkv or .mov; its directory is made if absent.
        fps: frames a second.
        size: height and width of every frame. An odd one gets a black row or column, which H.264 needs.

    Raises:
        MissingExtraError: imageio-ffmpeg is not installed.
        ConfigError: another suffix, a rate or size below 1, or a frame that is not uint8 [*size, 3].
        PenstockError: ffmpeg failed; the message ends with ffmpeg's own.
    """

    def __init__(self, path: Path, fps: int, size: tuple[int, int]) -> None:
        path = Path(path)
        if path.suffix.lower() not in _SUFFIXES:
            raise ConfigError(f"video path {path}; expected a name that ends in {', '.join(_SUFFIXES)}")
        if fps < 1 or min(size) < 1:
            raise ConfigError(f"video with fps={fps}, size={size}; expected positive numbers")
        program = require_ffmpeg()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._size = size
        self._frames = 0
        self._temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would fill and block ffmpeg)
        height, width = size
        command = [
            program,
            "-hide_banner",
            "-loglevel",
            "error",
            "-nostdin",
            "-y",
            "-f",
            "rawvideo",
            "-pix_fmt",
            "rgb24",
            "-s",
            f"{width}x{height}",
            "-r",
            str(fps),
            "-i",
            "pipe:0",
            "-an",
            "-vf",
            "pad=ceil(iw/2)*2:ceil(ih/2)*2",
            "-c:v",
            "libx264",
            "-preset",
            "veryfast",
            "-crf",
            "20",
            "-pix_fmt",
            "yuv420p",
            "-movflags",
            "+faststart",
            str(self._temporary),
        ]
        try:
            # A session of its own: Ctrl-C in the terminal must not reach ffmpeg before the frames end.
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PenstockError(f"cannot start {program}: {error}; reinstall imageio-ffmpeg") from error

    def write(self, frame: npt.NDArray[np.uint8]) -> None:
        """Appends one frame, [H, W, 3] uint8, RGB."""
        if frame.dtype != np.uint8 or frame.shape != (*self._size, 3):
            raise ConfigError(
                f"frame is {frame.dtype} {frame.shape}; expected uint8 {(*self._size, 3)} for {self._path}"
            )
        if self._process is None or self._process.stdin is None:
            raise PenstockError(f"{self._path} is closed; write before close")
        try:
            self._process.stdin.write(np.ascontiguousarray(frame).data)
            self._frames += 1
        except OSError as error:
            self._abort(str(error))

    def close(self) -> None:
        """Waits for ffmpeg and renames the file; a second call does nothing."""
        process = self._process
        if process is None or process.stdin is None:
            return
        if not self._frames:
            self._abort("no frame was written")
        try:
            process.stdin.close()
            code = process.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._abort(f"it did not end within {_CLOSE_S:.0f} s")
        except OSError as error:
            self._abort(str(error))
        else:
            if code != 0 or not self._temporary.exists():
                self._abort(f"it exited with {code}")
            os.replace(self._temporary, self._path)
            self._discard()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._discard()

    def _abort(self, cause: str) -> None:
        if self._process is not None and self._frames:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)  # for its last words
        self._stderr.seek(0)
        said = self._stderr.read()[-_STDERR_TAIL:].decode(errors="replace").strip()
        self._discard()
        raise PenstockError(f"ffmpeg could not write {self._path}: {cause}; it said: {said or 'nothing'}")

    def _discard(self) -> None:
        """Ends ffmpeg and removes the temporary file."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=_CLOSE_S)
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        self._stderr.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)


def require_ffmpeg() -> str:
    """The path of the ffmpeg program. Raises MissingExtraError without the extra `video`."""
    try:
        import imageio_ffmpeg  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError("imageio-ffmpeg", "video") from None
    return imageio_ffmpeg.get_ffmpeg_exe()
