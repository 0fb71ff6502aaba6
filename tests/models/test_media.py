"""Media decoding: what every kind of source becomes, and that hostile ones give one clear MediaError."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from polylens.config import MAX_IMAGE_PIXELS, MAX_VIDEO_FRAMES
from polylens.core import MediaItem, MediaKind
from polylens.errors import MediaError
from polylens.models import media_source, video_file
from polylens.models.media import image_item, load_image, load_video, sample_frames, video_item
from polylens.models.video_file import evenly_spaced, sampled_indices
from tests.families.media import picture, video


def png_bytes(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_video(path: Path, num_frames: int, fps: int = 10, size: tuple[int, int] = (64, 48)) -> Path:
    """Grey frames that get 5 brighter each, so that a frame's brightness tells its index."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.gop_size, stream.bit_rate = 1, 8_000_000  # every frame by itself and nearly without loss
        for index in range(num_frames):
            pixels = np.full((size[1], size[0], 3), min(index * 5, 250), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def read_or_refuse(load: Callable[[bytes], MediaItem], content: bytes) -> str:
    """What became of damaged content; a MediaError must be one line, and any other error fails the test."""
    try:
        load(content)
    except MediaError as error:
        return "refused" if "\n" not in str(error) else str(error)
    return "read"


def frame_numbers(item: MediaItem) -> list[int]:
    return (item.data.mean((1, 2, 3)) / 5).round().astype(int).tolist()


class TestImageSources:
    def test_every_source_gives_the_same_item(self, tmp_path: Path) -> None:
        image = picture(20, 12)
        path = tmp_path / "a b.png"
        path.write_bytes(png_bytes(image))
        data_url = "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode()
        sources = [image, np.asarray(image), path, str(path), path.as_uri(), data_url, png_bytes(image)]
        items = [load_image(source) for source in sources]
        assert len({item.key for item in items}) == 1
        for item in items:
            assert item.kind is MediaKind.IMAGE
            assert item.data.mode == "RGB"
            assert item.data.tobytes() == image.tobytes()
        assert load_image(items[0]) is items[0]

    def test_key_depends_on_every_byte_and_on_the_size(self) -> None:
        image = picture(20, 12)
        other = image.copy()
        red, green, blue = other.getpixel((19, 11))
        other.putpixel((19, 11), (red, green, blue ^ 1))
        reshaped = Image.frombytes("RGB", (12, 20), image.tobytes())
        keys = {image_item(x).key for x in (image, other, reshaped)}
        assert len(keys) == 3
        assert all(len(key) == 64 for key in keys)

    def test_image_and_one_frame_video_of_equal_bytes_have_different_keys(self) -> None:
        image = picture(20, 12)
        assert image_item(image).key != video_item(np.asarray(image)[None]).key


class TestModes:
    @pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
    def test_opaque_modes_become_pillows_rgb(self, mode: str) -> None:
        image = picture(16, 16).convert(mode)
        assert load_image(image).data.tobytes() == image.convert("RGB").tobytes()

    def test_cmyk_jpeg_file(self, tmp_path: Path) -> None:
        path = tmp_path / "cmyk.jpg"
        Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(path)  # red
        red, green, blue = load_image(path).data.getpixel((4, 4))
        assert red > 200
        assert max(green, blue) < 60

    def test_16_bit_grey_is_scaled_not_clipped(self, tmp_path: Path) -> None:
        path = tmp_path / "grey16.png"
        Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16)).save(path)
        assert np.asarray(load_image(path).data)[0, :, 0].tolist() == [0, 1, 128, 255]

    @pytest.mark.parametrize("mode", ["I", "F"])
    def test_32_bit_is_refused(self, mode: str) -> None:
        with pytest.raises(MediaError, match="no defined brightness range"):
            load_image(Image.new(mode, (4, 4)))

    def test_transparency_is_put_on_white(self, tmp_path: Path) -> None:
        image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
        image.putpixel((0, 0), (0, 0, 255, 255))
        pixels = load_image(image).data
        assert pixels.getpixel((0, 0)) == (0, 0, 255)
        assert pixels.getpixel((3, 3)) == (255, 255, 255)

    def test_palette_transparency_is_put_on_white(self, tmp_path: Path) -> None:
        path = tmp_path / "palette.png"
        image = Image.new("P", (2, 1))
        image.putpalette([10, 20, 30, 40, 50, 60])
        image.putpixel((1, 0), 1)
        image.save(path, transparency=0)
        pixels = load_image(path).data
        assert pixels.getpixel((0, 0)) == (255, 255, 255)
        assert pixels.getpixel((1, 0)) == (40, 50, 60)

    def test_exif_orientation_is_applied(self, tmp_path: Path) -> None:
        path = tmp_path / "turned.png"
        image = picture(20, 12)
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path, exif=exif)
        item = load_image(path)
        assert item.data.size == (12, 20)
        assert item.data.tobytes() == image.transpose(Image.Transpose.ROTATE_270).tobytes()

    def test_animation_gives_its_first_frame(self, tmp_path: Path) -> None:
        path = tmp_path / "moving.gif"
        frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
        frames[0].save(path, save_all=True, append_images=frames[1:])
        assert load_image(path).data.getpixel((0, 0)) == (255, 0, 0)


class TestHostileImages:
    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(MediaError, match=r"nowhere\.png' does not exist"):
            load_image(str(tmp_path / "nowhere.png"))

    def test_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty.png").touch()
        with pytest.raises(MediaError, match=r"empty \(0 bytes\)"):
            load_image(tmp_path / "empty.png")

    @pytest.mark.parametrize("source", [b"", "data:image/png;base64,"])
    def test_empty_content(self, source: bytes | str) -> None:
        with pytest.raises(MediaError, match=r"empty \(0 bytes\)"):
            load_image(source)

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(MediaError, match="not a regular file"):
            load_image(tmp_path)

    def test_endless_device(self) -> None:
        with pytest.raises(MediaError, match="not a regular file"):
            load_image("/dev/zero")

    @pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
    def test_impossible_path(self, path: str) -> None:
        with pytest.raises(MediaError) as caught:
            load_image(path)
        assert len(str(caught.value)) < 400

    @pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
    def test_truncated_png(self, share: float) -> None:
        content = png_bytes(picture(64, 64))
        with pytest.raises(MediaError, match="cannot be decoded"):
            load_image(content[: int(len(content) * share)])

    def test_text_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_text("hello")
        with pytest.raises(MediaError, match="not a picture"):
            load_image(tmp_path / "a.png")

    def test_program_running_formats_are_not_tried(self) -> None:
        with pytest.raises(MediaError, match="not a picture"):
            load_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")

    @pytest.mark.parametrize("side", [8193, 20000, 60000])
    def test_decompression_bomb_is_refused_before_decoding(self, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("pixels were decoded")

        monkeypatch.setattr(Image.Image, "load", refuse)
        assert side * side > MAX_IMAGE_PIXELS
        with pytest.raises(MediaError, match="too large"):
            load_image(_png_header(side, side))

    def test_bomb_in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(media_source, "MAX_IMAGE_PIXELS", 99)
        with pytest.raises(MediaError, match="too large: 10 x 10"):
            load_image(Image.new("RGB", (10, 10)))

    @pytest.mark.parametrize("url", ["http://example.com/a.png", "https://example.com/a.png", "s3://bucket/a.png"])
    def test_addresses_are_not_fetched(self, url: str) -> None:
        with pytest.raises(MediaError, match="not fetched"):
            load_image(url)

    @pytest.mark.parametrize("source", ["~nobody-of-this-name/a.png", "http://[a/b.png", "file://[a/b.png"])
    def test_paths_and_addresses_that_mean_nothing(self, source: str) -> None:
        with pytest.raises(MediaError, match="cannot be opened"):
            load_image(source)

    @pytest.mark.parametrize("url", ["data:image/png;base64,@@@", "data:image/png,abc", "data:"])
    def test_bad_data_url(self, url: str) -> None:
        with pytest.raises(MediaError, match="data:"):
            load_image(url)

    @pytest.mark.parametrize("source", [None, 3, {"a": 1}, [1]])
    def test_other_types(self, source: object) -> None:
        with pytest.raises(MediaError, match="cannot read media from"):
            load_image(source)

    def test_array_of_another_shape_or_type(self) -> None:
        with pytest.raises(MediaError, match="must be uint8"):
            load_image(np.zeros((4, 4, 4), dtype=np.uint8))
        with pytest.raises(MediaError, match="must be uint8"):
            load_image(np.zeros((4, 4, 3)))

    def test_no_pixels(self) -> None:
        with pytest.raises(MediaError, match="no pixels"):
            load_image(np.zeros((0, 4, 3), dtype=np.uint8))

    @pytest.mark.parametrize("seed", range(40))
    def test_damaged_files_decode_or_raise_media_errors(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        buffer = io.BytesIO()
        picture(24, 24, seed).save(buffer, ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"][seed % 6])
        content = bytearray(buffer.getvalue())
        for position in rng.integers(0, len(content), 12):
            content[position] = rng.integers(0, 256)
        assert read_or_refuse(load_image, bytes(content)) in ("read", "refused")


def _png_header(width: int, height: int) -> bytes:
    """A PNG file that says how large it is and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


class TestVideoSources:
    def test_array_and_list_of_pictures_are_used_frame_by_frame(self) -> None:
        frames = video(3, 16, 12)
        item = load_video(frames, fps=4)
        assert (item.kind, item.fps) == (MediaKind.VIDEO, 4)
        assert np.array_equal(item.data, frames)
        listed = load_video([Image.fromarray(frame) for frame in frames], fps=4)
        assert listed.key == item.key
        assert load_video(frames).key != item.key
        assert load_video(item) is item

    def test_file_is_sampled_at_two_frames_a_second(self, tmp_path: Path) -> None:
        item = load_video(write_video(tmp_path / "v.mp4", 50))
        assert frame_numbers(item) == sampled_indices(50, 10.0, 2.0) == evenly_spaced(50, 10)
        assert item.fps == pytest.approx(9 * 10 / 49)

    def test_file_with_a_wanted_rate(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "v.mp4", 50)
        assert frame_numbers(load_video(path, fps=1)) == evenly_spaced(50, 4)
        assert len(load_video(path, fps=100).data) == 50

    def test_bytes_url_and_path_give_the_same_item(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "v.mp4", 20)
        url = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
        assert len({load_video(source).key for source in (path, str(path), path.read_bytes(), url)}) == 1

    def test_short_file_is_taken_whole(self, tmp_path: Path) -> None:
        item = load_video(write_video(tmp_path / "v.mp4", 3))
        assert frame_numbers(item) == [0, 2]

    def test_animated_gif_is_a_video(self, tmp_path: Path) -> None:
        path = tmp_path / "moving.gif"
        frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue", "white")]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
        item = load_video(path)
        assert item.data[:, 0, 0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]

    @pytest.mark.parametrize(("degrees", "quarter_turns"), [(None, 0), (90, 1), (-90, 3), (180, 2)])
    def test_rotation_of_phone_videos_is_applied(self, degrees: int | None, quarter_turns: int) -> None:
        """`rotation`: counterclockwise degrees, from the file's display matrix."""
        pixels = video(1, 8, 6)[0]

        class Frame:
            width, height, rotation = 8, 6, degrees

            def reformat(self, **_: object) -> Frame:
                return self

            def to_ndarray(self) -> np.ndarray:
                return pixels

        assert np.array_equal(video_file.rgb_frame(Frame(), 1), np.rot90(pixels, quarter_turns))

    def test_large_frames_are_scaled_down_to_the_budget(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(video_file, "MAX_VIDEO_PIXELS", 4 * 16 * 12)
        item = load_video(write_video(tmp_path / "v.mp4", 20))
        assert item.data.shape == (4, 12, 16, 3)

    @pytest.mark.parametrize(
        ("total", "source_fps", "fps", "expected"),
        [
            (1, 30.0, 2.0, 1),
            (3, 30.0, 2.0, 2),
            (30, 30.0, 2.0, 4),
            (90, 30.0, 2.0, 6),
            (108000, 30.0, 2.0, MAX_VIDEO_FRAMES),
            (7, None, 2.0, 6),
        ],
    )
    def test_number_of_sampled_frames(self, total: int, source_fps: float | None, fps: float, expected: int) -> None:
        indices = sampled_indices(total, source_fps, fps)
        assert len(indices) == expected
        assert indices == sorted(set(indices))
        assert indices[0] == 0
        assert indices[-1] == (total - 1 if expected > 1 else 0)

    def test_frames_as_pictures(self) -> None:
        item = video_item(video(10, 16, 12))
        frames = sample_frames(item, 4)
        assert [frame.size for frame in frames] == [(16, 12)] * 4
        assert [np.asarray(frame).tolist() for frame in frames] == [item.data[i].tolist() for i in (0, 3, 6, 9)]
        assert len(sample_frames(video_item(video(2, 16, 12)), 4)) == 2


class TestHostileVideos:
    def test_truncated_file(self, tmp_path: Path) -> None:
        content = write_video(tmp_path / "v.mp4", 50).read_bytes()
        for share in (0.2, 0.5, 0.9):
            with pytest.raises(MediaError):
                load_video(content[: int(len(content) * share)])

    def test_truncated_file_with_its_index_in_front(self, tmp_path: Path) -> None:
        path = tmp_path / "v.avi"
        content = write_video(path, 50, size=(320, 240)).read_bytes()
        with pytest.raises(MediaError, match=r"could be read|cannot be decoded"):
            load_video(content[: len(content) // 2])

    @pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 1000])
    def test_not_a_video(self, content: bytes) -> None:
        with pytest.raises(MediaError):
            load_video(content)

    def test_playlists_do_not_open_other_files(self, tmp_path: Path) -> None:
        secret = write_video(tmp_path / "secret.ts", 10)
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{secret.as_uri()}\n#EXT-X-ENDLIST\n"
        with pytest.raises(MediaError, match="cannot be decoded"):
            load_video(playlist.encode())
        (tmp_path / "list.txt").write_text(f"ffconcat version 1.0\nfile '{secret}'\n")
        with pytest.raises(MediaError, match="cannot be decoded"):
            load_video(tmp_path / "list.txt")

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(MediaError, match="does not exist"):
            load_video(tmp_path / "v.mp4")

    def test_frames_of_different_sizes(self) -> None:
        with pytest.raises(MediaError, match=r"frame 1 .* make them equal"):
            load_video([picture(8, 8), picture(8, 9)])

    def test_number_of_frames(self) -> None:
        with pytest.raises(MediaError, match="must have 1 to"):
            load_video([])
        with pytest.raises(MediaError, match="must have 1 to"):
            load_video(np.zeros((MAX_VIDEO_FRAMES + 1, 2, 2, 3), dtype=np.uint8))

    @pytest.mark.parametrize("array", [np.zeros((2, 4, 4, 3)), np.zeros((2, 3, 4, 4), dtype=np.uint8), np.zeros(3)])
    def test_array_of_another_shape_or_type(self, array: np.ndarray) -> None:
        with pytest.raises(MediaError, match="must be uint8"):
            load_video(array)

    @pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), "2", True])
    def test_impossible_rate(self, fps: object) -> None:
        with pytest.raises(MediaError, match="fps must be a positive number"):
            load_video(video(2, 8, 8), fps=fps)  # type: ignore[arg-type]

    def test_image_where_a_video_is_expected(self) -> None:
        with pytest.raises(MediaError, match="expected a decoded video"):
            load_video(image_item(picture(8, 8)))

    def test_too_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(video_file, "MAX_SOURCE_FRAMES", 10)
        with pytest.raises(MediaError, match="too long"):
            load_video(write_video(tmp_path / "v.mp4", 20))

    def test_too_much_to_decode(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(video_file, "MAX_SOURCE_PIXELS", 20 * 64 * 48 - 1)
        with pytest.raises(MediaError, match="too large to decode: 20 frames of 64 x 48"):
            load_video(write_video(tmp_path / "v.mp4", 20))

    def test_another_rate_for_a_decoded_video(self) -> None:
        item = video_item(video(2, 8, 8), 2.0)
        assert load_video(item, 2) is item
        with pytest.raises(MediaError, match="decoded as 2"):
            load_video(item, 3)

    def test_frame_bomb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(media_source, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(MediaError, match="too large"):
            load_video(write_video(tmp_path / "v.mp4", 20))

    @pytest.mark.parametrize("seed", range(12))
    def test_damaged_files_decode_or_raise_media_errors(self, tmp_path: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        content = bytearray(write_video(tmp_path / f"v.{['mp4', 'avi', 'mkv'][seed % 3]}", 12).read_bytes())
        for position in rng.integers(0, len(content), 20):
            content[position] = rng.integers(0, 256)
        assert read_or_refuse(load_video, bytes(content)) in ("read", "refused")
