"""Chunks that zarr itself reads, decoded no further than the size that their array declares."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self

import numpy as np
import zarr
from zarr.abc.codec import Codec
from zarr.codecs import ShardingCodec
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import fully_qualified_name, register_pipeline

from ml4cube.cube.chunks.codecs import ChunkCodecs

_SETTING = "codec_pipeline.path"


class BoundedPipeline(BatchedCodecPipeline):
    """Decodes chunks by `ChunkCodecs` where it knows their codecs, and as zarr does otherwise."""

    @classmethod
    def from_codecs(cls, codecs: Iterable[Codec], *, batch_size: int | None = None) -> Self:
        """Make a pipeline, which also bounds the chunks inside shards."""
        bounded = [_with_bounded_chunks(codec) for codec in codecs]
        return super().from_codecs(bounded, batch_size=batch_size)

    async def decode_batch(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """Decode chunks."""
        chunks = list(chunk_bytes_and_specs)
        codecs = _codecs_of(self)
        if codecs is None or any(spec.dtype.to_native_dtype().hasobject for _, spec in chunks):
            return await super().decode_batch(chunks)
        # of zarr format 3, `spec.order` is that of arrays in memory, by a setting of zarr
        has_stored_order = isinstance(self.array_bytes_codec, V2Codec)
        decoded = []
        for data, spec in chunks:
            order = spec.order if has_stored_order else "C"
            decoded.append(asyncio.to_thread(_decode, codecs, data, spec, order))
        return await asyncio.gather(*decoded)


class _BoundedShards(ShardingCodec):
    """Shards whose chunks are decoded by a `BoundedPipeline`."""

    @property
    def codec_pipeline(self) -> BoundedPipeline:
        return BoundedPipeline.from_codecs(self.codecs)


def bounded_decoding() -> AbstractContextManager[Any]:
    """Bound what is decoded of chunks of the arrays that are opened in this context.

    A pipeline that the user has chosen is left alone.
    """
    if zarr.config.get(_SETTING) != fully_qualified_name(BatchedCodecPipeline):
        return nullcontext()
    register_pipeline(BoundedPipeline)
    context: AbstractContextManager[Any] = zarr.config.set(
        {_SETTING: fully_qualified_name(BoundedPipeline)}
    )
    return context


def _with_bounded_chunks(codec: Codec) -> Codec:
    if type(codec) is not ShardingCodec:
        return codec
    return _BoundedShards(
        chunk_shape=codec.chunk_shape,
        codecs=codec.codecs,
        index_codecs=codec.index_codecs,
        index_location=codec.index_location,
    )


def _codecs_of(pipeline: BatchedCodecPipeline) -> ChunkCodecs | None:
    """Return the codecs of a pipeline; None if they are not known."""
    first = pipeline.array_bytes_codec
    if isinstance(first, V2Codec):
        return ChunkCodecs.of_v2(
            {"compressor": first.compressor, "filters": first.filters, "order": "C"}
        )
    return ChunkCodecs.of_v3([codec.to_dict() for codec in pipeline])


def _decode(
    codecs: ChunkCodecs, data: Buffer | None, spec: ArraySpec, order: Literal["C", "F"]
) -> NDBuffer | None:
    if data is None:
        return None
    cells = np.empty(int(np.prod(spec.shape)), spec.dtype.to_native_dtype())
    codecs.decode(data.as_numpy_array().view(np.uint8), cells)
    return spec.prototype.nd_buffer.from_numpy_array(cells.reshape(spec.shape, order=order))
