"""The fixed matrix of prefill and decode workers that must be compatible. Data only."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = (1, 2, 3, 4, 8)

MODELS = {
    "gqa": "layers=3,heads=4,parts=k:16/v:16",
    "gqa8": "layers=2,heads=8",
    "gqa6": "layers=2,heads=6,parts=k:8/v:8",
    "gqa5": "layers=2,heads=5",
    "mha": "layers=2,heads=16,head_bytes=8",
    "mqa": "layers=2,heads=1,parts=k:16/v:16",
    "mla": "layers=3,heads=1,parts=latent:40",
    "mla-apart": "layers=3,heads=1,parts=nope:32/rope:8",
    "int8": "layers=2,heads=4,parts=k:16:int8/v:16:int8/k_scale:4:float32/v_scale:4:float32",
    "fp8-mla": "layers=2,heads=1,parts=nope:32:float8_e4m3/scale:4:float32/rope:16:bfloat16",
    "index": "layers=2,heads=1,parts=nope:32/rope:8,index_layers=2",
    "state": "layers=2,heads=4,state_layers=2,state_heads=4",
    "state-mla": "layers=2,heads=1,parts=nope:32/rope:8,state_layers=3,state_heads=6",
    "state-int8": "layers=2,heads=2,state_layers=2,state_parts=conv:6:int8/ssm:33:int8/scale:2",
    "all": "layers=3,heads=2,parts=k:16:int8/scale:4:float32,index_layers=2,state_layers=2",
    "opaque": "layers=2,heads=4,parts=k:16/v:16,block_format=token_inner",
    "opaque-mla": "layers=2,heads=1,parts=nope:32/rope:8,block_format=token_inner",
    "opaque-int8": "layers=2,heads=4,parts=k:12:int8/scale:4:float32,block_format=token_inner",
    "opaque-state": "layers=2,heads=2,state_layers=1,block_format=token_inner",
}

BLOCKS_OUTER = "order=block/layer/part/head/token"
APART = "order=part/layer/block/head/token"
TOGETHER = "order=layer/block/token/head/part"
NHD = "order=nhd"
HND = "order=hnd"


@dataclass(frozen=True, slots=True)
class Side:
    """One worker: ranks of a stage, tokens of a block, and settings of its own.

    `broadcast`: whether its ranks copy equal bytes to each other.
    """

    ranks: int
    block_tokens: int = 8
    settings: str = ""
    broadcast: bool = False

    def __str__(self) -> str:
        parts = [f"{self.ranks}"]
        if self.block_tokens != 8:
            parts.append(f"blocks of {self.block_tokens}")
        parts += [setting for setting in self.settings.split(",") if setting]
        parts += ["broadcast"] * self.broadcast
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Pairing:
    """A model (a name in MODELS), its prefill worker and its decode worker."""

    model: str
    prefill: Side
    decode: Side

    def __str__(self) -> str:
        return f"{self.model}: {self.prefill} -> {self.decode}"


PAIRINGS: tuple[Pairing, ...] = (
    # Fewer, as many and more ranks than heads on either side, blocks the same.
    *(Pairing("gqa", Side(p), Side(d)) for p in SIZES for d in SIZES),
    *(Pairing("mla", Side(p), Side(d)) for p in (1, 3, 8) for d in (1, 2, 4)),
    # Four ranks with the same head to two.
    Pairing("mla", Side(4), Side(2)),
    Pairing("mla-apart", Side(4), Side(2, 16, NHD)),
    Pairing("mla-apart", Side(2), Side(8)),
    Pairing("mla-apart", Side(8), Side(8, broadcast=True)),
    Pairing("mla-apart", Side(1, 16), Side(4, 4, broadcast=True)),
    Pairing("mqa", Side(4), Side(2)),
    Pairing("mqa", Side(2, settings=NHD), Side(3, settings=APART)),
    Pairing("mqa", Side(3), Side(8, broadcast=True)),
    Pairing("mha", Side(8), Side(1, settings=NHD)),
    Pairing("mha", Side(1, settings=NHD), Side(8)),
    Pairing("mha", Side(4), Side(8, 16)),
    # Heads that the ranks cannot share evenly.
    Pairing("gqa6", Side(3), Side(2)),
    Pairing("gqa6", Side(2), Side(3, settings=NHD)),
    Pairing("gqa6", Side(3), Side(4, 16)),
    Pairing("gqa6", Side(4), Side(3)),
    Pairing("gqa5", Side(2), Side(5)),
    Pairing("gqa5", Side(3, settings=NHD), Side(2, settings=HND)),
    Pairing("gqa5", Side(8), Side(3)),
    # Orders and block sizes.
    Pairing("gqa8", Side(2, settings=NHD), Side(4, settings=HND)),
    Pairing("gqa8", Side(2, settings=HND), Side(4, settings=NHD)),
    Pairing("gqa8", Side(4, settings=NHD), Side(2, settings=NHD)),
    Pairing("gqa8", Side(4, 16), Side(8, 4)),
    Pairing("gqa8", Side(8, 5), Side(4, 7)),
    Pairing("gqa8", Side(2, 16, NHD), Side(3, 12, BLOCKS_OUTER)),
    Pairing("gqa", Side(2, settings=BLOCKS_OUTER), Side(4, settings=APART)),
    Pairing("gqa", Side(4, settings=TOGETHER), Side(2, settings=APART)),
    Pairing("gqa", Side(1, 12, APART), Side(3, 16, TOGETHER)),
    # Pipeline stages.
    Pairing("gqa", Side(2, settings="stages=2"), Side(2)),
    Pairing("gqa", Side(1), Side(2, settings="stages=3")),
    Pairing("gqa6", Side(3, settings="stages=2"), Side(2, 16, "stages=2,order=nhd")),
    Pairing("mla", Side(2, settings="stages=3"), Side(4, settings="stages=2", broadcast=True)),
    Pairing("mla-apart", Side(1, settings="stages=2"), Side(2, 16, "stages=3")),
    # Scales beside the values.
    Pairing("int8", Side(2), Side(4)),
    Pairing("int8", Side(4, 16, NHD), Side(2, 8, TOGETHER)),
    Pairing("int8", Side(3), Side(8)),
    Pairing("fp8-mla", Side(4), Side(2, settings=TOGETHER)),
    Pairing("fp8-mla", Side(1, 16, TOGETHER), Side(4, 8, broadcast=True)),
    # Groups with block sizes of their own.
    Pairing("index", Side(2, settings="index_block_tokens=16"), Side(4)),
    Pairing("index", Side(4, 16), Side(2, 8, "index_block_tokens=4,order=nhd")),
    Pairing("index", Side(1, settings="stages=2"), Side(2, 16, "index_block_tokens=12")),
    # States, sent completely at the end.
    Pairing("state", Side(1), Side(1)),
    Pairing("state", Side(4), Side(2, 16, NHD)),
    Pairing("state", Side(2, settings="stages=2"), Side(8)),
    Pairing("state-mla", Side(4), Side(2)),
    Pairing("state-mla", Side(3), Side(4, settings="stages=2", broadcast=True)),
    Pairing("state-mla", Side(8, 16), Side(3, 4)),
    Pairing("state-int8", Side(2, settings=NHD), Side(3)),
    Pairing("all", Side(4, 16, "index_block_tokens=8"), Side(2, 8, "stages=2,order=nhd")),
    Pairing("all", Side(3, settings="stages=3"), Side(4, 4, BLOCKS_OUTER, broadcast=True)),
    # Blocks that can only be copied whole.
    Pairing("opaque", Side(4), Side(2)),
    Pairing("opaque", Side(3, settings=NHD), Side(8, settings=BLOCKS_OUTER)),
    Pairing("opaque", Side(1, settings=APART), Side(2, settings="stages=2")),
    Pairing("opaque-mla", Side(4), Side(2)),
    Pairing("opaque-mla", Side(2), Side(4, broadcast=True)),
    Pairing("opaque-int8", Side(2), Side(4)),
    Pairing("opaque-state", Side(4), Side(3)),
)
