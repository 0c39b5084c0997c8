"""How well and how fast samples of real and made fields compress.

Writes `benchmarks/results/codecs.json`. Samples are scaled float32 windows, as the sampler stores
them, encoded in chunks of about half a megabyte on one core; the best of several repeats counts.
Run it as ``make bench-codecs``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import iris_sample_data
import numpy as np
import xarray as xr
from numcodecs import blosc

from ml4cube.store.precision import Precision
from ml4cube.store.shard_encoding import Compressor

RESULTS = Path(__file__).parent / "results" / "codecs.json"
CHUNK_BYTES = 2**19
CODECS = {
    "none": Compressor(None),
    "lz4": Compressor("lz4", 5, "noshuffle"),
    "lz4, shuffle": Compressor("lz4", 5, "shuffle"),
    "lz4, bitshuffle": Compressor("lz4", 5, "bitshuffle"),
    "zstd 1, bitshuffle": Compressor("zstd", 1, "bitshuffle"),
    "zstd 5, bitshuffle": Compressor("zstd", 5, "bitshuffle"),
}
STORED = {
    "float32": Precision.parse(None, None),
    "float32, 10 bits": Precision.parse(None, 10),
    "float16": Precision.parse("float16", None),
}


def scaled(values: np.ndarray) -> np.ndarray:
    """Standardize the finite values; gaps become 0, as a sampler that fills would write."""
    values = (values - np.nanmean(values, dtype="f8")) / np.nanstd(values, dtype="f8")
    return np.nan_to_num(values).astype("float32")


def windows(field: np.ndarray, size: int) -> np.ndarray:
    """Cut ``(time, y, x)`` into square windows, one time step each."""
    t, y, x = field.shape
    field = field[:, : y // size * size, : x // size * size]
    cut = field.reshape(t, y // size, size, x // size, size).swapaxes(2, 3)
    return np.ascontiguousarray(cut.reshape(-1, size, size))


def fields() -> dict[str, np.ndarray]:
    """Two real fields, a smooth and a noisy made one."""
    folder = Path(iris_sample_data.path)
    sst = xr.open_dataset(folder / "ostia_monthly.nc")["surface_temperature"].values
    air = xr.open_dataset(folder / "A1B_north_america.nc", decode_times=False)
    rng = np.random.default_rng(0)
    t, y, x = np.meshgrid(np.arange(60), np.arange(192), np.arange(192), indexing="ij")
    smooth = np.sin(x / 30 + t / 5) * np.cos(y / 40) + 0.3 * np.sin(x / 9 - y / 11)
    return {
        "OSTIA sea surface temperature, monthly": windows(scaled(sst), 16),
        "A1B air temperature, yearly": windows(scaled(air["air_temperature"].values), 16),
        "made, smooth waves": windows(scaled(smooth), 16),
        "made, white noise": windows(scaled(rng.normal(size=smooth.shape)), 16),
    }


def measure(samples: np.ndarray, codec: Compressor, repeats: int) -> dict[str, float]:
    """Ratio, and megabytes of samples per second and core."""
    step = max(1, CHUNK_BYTES // samples[0].nbytes)
    chunks = [np.ascontiguousarray(samples[i : i + step]) for i in range(0, len(samples), step)]
    out = np.empty_like(chunks[0])
    encode, decode = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        encoded = [codec.compress(chunk, chunk.itemsize) for chunk in chunks]
        encode.append(time.perf_counter() - started)
        started = time.perf_counter()
        for chunk, data in zip(chunks, encoded, strict=True):
            target = out[: len(chunk)]
            if codec.cname is None:
                target[...] = np.frombuffer(data, chunk.dtype, chunk.size).reshape(chunk.shape)
            else:
                blosc.decompress(data[:-4], target)
        decode.append(time.perf_counter() - started)
    mb = samples.nbytes / 1e6
    return {
        "ratio": samples.nbytes / sum(map(len, encoded)),
        "encode_mb_s": mb / min(encode),
        "decode_mb_s": mb / min(decode),
    }


def main() -> None:
    """Measure, print a table in Markdown, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    blosc.set_nthreads(1)
    results: dict[str, Any] = {}
    for field, samples in fields().items():
        results[field] = {}
        print(f"\n**{field}**, {samples.nbytes / 1e6:.0f} MB as float32\n")
        print("| stored | codec | ratio to float32 | encode MB/s | decode MB/s |")
        print("|---|---|---|---|---|")
        for stored, precision in STORED.items():
            kept = precision.apply("", samples)
            default = Compressor.parse("lz4", rounded=bool(precision.keepbits))
            for codec_name, codec in CODECS.items():
                name = f"{codec_name} (default)" if codec == default else codec_name
                row = measure(kept, codec, repeats)
                row["ratio"] *= samples.nbytes / kept.nbytes
                results[field][f"{stored}; {name}"] = row
                print(
                    f"| {stored} | {name} | {row['ratio']:.2f} | {row['encode_mb_s']:.0f} | "
                    f"{row['decode_mb_s']:.0f} |"
                )
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "fields": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
