"""What files are, from their first bytes: as programs of others write them, and by any name."""

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from labcode.runtime.file_kinds import kind_of

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 50257, 3000)


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz():
    out = io.BytesIO()
    np.savez(out, a=np.ones(3))
    return out.getvalue()


def torch_file(old=False):
    out = io.BytesIO()
    torch.save({"a": torch.ones(2)}, out, _use_new_zipfile_serialization=not old)
    return out.getvalue()


def zip_of(name):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(name, b"x")
    return out.getvalue()


def tar():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        file.addfile(tarfile.TarInfo("00000.txt"), io.BytesIO())
    return out.getvalue()


def llm_c(magic, version, dtype):
    return (
        np.array([magic, version, 3000] + [0] * 253, "<i4").tobytes()
        + TOKENS.astype(dtype).tobytes()
    )


GERMAN = "Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum einen Hauch.\n" * 9
RUSSIAN = "Все счастливые семьи похожи друг на друга.\n" * 5000
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"
# (name of the file, its bytes, what it is)
FILES = [
    ("a.txt", b"To be, or not to be", "text"),
    ("b.txt", b"\xef\xbb\xbf" + GERMAN.encode(), "text"),
    ("c.txt", RUSSIAN.encode()[: 2**16 + 7], "text"),  # cut in the middle of a character
    ("d.csv", b"time,t2m\n2020-01-01,281.3\n", "text"),
    ("e.py", b"def f(x):\n\treturn {x: [1]}\n", "text"),
    ("f.json", b'{\n  "a": 1\n}\n', "text"),
    ("g.txt", b"\x1b[31mred\x1b[0m\n", "text"),
    ("h.txt", GERMAN.encode("latin-1"), "other text"),
    ("i.txt", b"caf\xe9 au lait", "other text"),
    ("j.txt", GERMAN.encode("utf-16"), "UTF-16"),
    ("k.txt", GERMAN.encode("utf-32"), "UTF-32"),
    ("l.jsonl", b'{"text": "To be"}\n{"text": "or not"}\n', "json"),
    ("m.txt", b"<!DOCTYPE html>\n<html lang=en>", "html"),
    ("n.nc", b"\n<html><head><title>404 Not Found", "html"),
    ("o.bin", LFS, "lfs"),
    ("p.txt", b"", "empty"),
    ("q.txt.gz", gzip.compress(b"text"), "gzip"),
    ("r.txt.bz2", bz2.compress(b"text"), "packed"),
    ("s.txt.xz", lzma.compress(b"text"), "packed"),
    ("t.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\x58\x19\x00", "packed"),
    ("u.tar", tar(), "tar"),
    ("v.zip", zip_of("era5/data_0.nc"), "zip"),
    ("era5.nc", zip_of("data_stream-oper.nc"), "zip"),
    ("w.docx", zip_of("[Content_Types].xml"), "document"),
    ("x.epub", zip_of("mimetype"), "document"),
    ("y.pdf", b"%PDF-1.7\n%\xe2\xe3", "pdf"),
    ("train.bin", TOKENS.astype("<u2").tobytes(), "tokens 2"),
    ("train4.bin", TOKENS.astype("<u4").tobytes(), "tokens 4"),
    ("char.bin", RNG.integers(0, 65, 3000).astype("<u2").tobytes(), "tokens 2"),
    ("llama.bin", RNG.integers(0, 128256, 3000).astype("<u4").tobytes(), "tokens 4"),
    ("dna.bin", RNG.integers(0, 5, 3000).astype("<u2").tobytes(), "tokens 2"),
    ("dna4.bin", RNG.integers(0, 5, 3000).astype("<u4").tobytes(), "tokens 4"),
    ("part-0-00000.npy", TOKENS.astype("<u2").tobytes(), "tokens 2"),  # as OLMo writes it
    ("c4.jsonl", b'{"text": "' + b"To be, or not to be. " * 9000 + b'"}\n', "json"),
    ("newer.bin", llm_c(20240520, 2, "<u2"), "llm.c"),
    ("fineweb_train_000001.bin", llm_c(20240520, 1, "<u2"), "llm.c 2"),
    ("fineweb_llama.bin", llm_c(20240801, 7, "<u4"), "llm.c 4"),
    ("my.idx", b"MMIDIDX\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x08", "megatron"),
    ("train.npy", npy(TOKENS), "npy"),
    ("a.npz", npz(), "npz"),
    ("a.parquet", b"PAR1\x15\x04\x15" + bytes(40) + b"PAR1", "parquet"),
    ("data-00000-of-00001.arrow", b"ARROW1\x00\x00" + bytes(40), "arrow"),
    ("meta.pkl", pickle.dumps({"vocab_size": 65}), "pickle"),
    ("ckpt.pt", torch_file(), "torch"),
    ("old.pt", torch_file(old=True), "old torch"),
    ("tas.nc", b"\x89HDF\r\n\x1a\n" + bytes(100), "hdf5"),
    ("userblock.h5", bytes(512) + b"\x89HDF\r\n\x1a\n", "hdf5"),
    ("no_suffix", b"\x89HDF\r\n\x1a\n" + bytes(100), "hdf5"),
    ("classic.nc", b"CDF\x01" + bytes(40), "netcdf3"),
    ("offset64.nc", b"CDF\x02" + bytes(40), "netcdf3"),
    ("cdf5.nc", b"CDF\x05" + bytes(40), "netcdf5"),
    ("era5.nc", b"GRIB\x00\x02\x9c\x01", "grib"),
    ("MOD08.hdf", b"\x0e\x03\x13\x01" + bytes(40), "hdf4"),
    ("a.tif", b"II*\x00\x08\x00\x00\x00", "tiff"),
    ("a.gguf", b"GGUF\x03\x00\x00\x00", "gguf"),
    ("noise.dat", RNG.bytes(5000), "unknown"),
]


# the bytes of archives have the time in them, which must not be in the name of a test
IDS = [f"{name} {kind}" for name, _, kind in FILES]


@pytest.mark.parametrize(("name", "content", "kind"), FILES, ids=IDS)
def test_what_a_file_is(tmp_path, name, content, kind):
    path = tmp_path / name
    path.write_bytes(content)
    found = kind_of(path)
    assert found.name == kind, found.words
    assert "\n" not in found.is_not(path, "a text")


def test_a_safetensors_file(tmp_path):
    save_file({"a": np.ones(3)}, tmp_path / "m.safetensors")
    assert kind_of(tmp_path / "m.safetensors").name == "safetensors"


def test_a_database(tmp_path):
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("create table t (x)")
    connection.close()
    assert kind_of(tmp_path / "a.db").name == "sqlite"


def test_folders(tmp_path):
    def folder(name, *files):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"{}")
        return kind_of(tmp_path / name).name

    assert folder("era5", ".zmetadata", ".zgroup") == "zarr"
    assert folder("v3", "zarr.json") == "zarr"
    assert folder("gone.zarr", "t2m") == "zarr"
    assert folder("hf", "dataset_info.json", "data-00000-of-00001.arrow") == "arrow folder"
    assert folder("tables", "a.parquet") == "parquet folder"
    assert folder("months", "2020-01.nc") == "folder"
    assert folder("nothing") == "empty folder"
    assert kind_of(tmp_path / "nowhere").name == "missing"


def test_every_random_row_of_tokens_is_taken_for_tokens(tmp_path):
    for seed in range(50):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(300, 40_000))
        for dtype, kind in (("<u2", "tokens 2"), ("<u4", "tokens 4")):
            most = 50257 if dtype == "<u2" else 128256
            # a few numbers are frequent, as words are
            tokens = np.minimum(rng.zipf(1.2, size), most - 1).astype(dtype)
            path = tmp_path / "train.bin"
            path.write_bytes(tokens.tobytes())
            assert kind_of(path).name == kind, (seed, dtype)


def test_the_header_of_safetensors_is_no_bigger_than_its_file(tmp_path):
    path = tmp_path / "part.safetensors"
    path.write_bytes(struct.pack("<Q", 10**6) + b'{"a":')
    assert kind_of(path).name == "unknown"
