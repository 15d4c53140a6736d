"""The report of a load, `model.tp_report`: bytes, seconds and reads of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import size


@dataclass(frozen=True)
class LoadReport:
    """One rank's load of its shard: `model.tp_report`; `print` shows it in a line."""

    rank: int
    shares: tuple[int, ...]
    """Bytes that every rank holds."""
    seconds: float
    """From opening the files until the parameters were in place."""
    reading_seconds: float
    """Seconds of these spent reading."""
    bytes_read: int
    """Bytes that this rank copied out of files, headers included."""
    reads: int
    """Read calls, and copies out of memory maps."""
    methods: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """Method -> (bytes of the shard, bytes copied for them, seconds summed over threads)."""
    threads: int = 1
    peak_buffer: int = 0
    """Total bytes of all staging buffers."""
    mapped: int = 0
    """Bytes of the shard that are memory-mapped pages of the files (`tp_map`), not copied."""
    prefetched: int = 0
    """Bytes that this rank read into a cold page cache, for all ranks of its node."""
    sampled: int = 0
    """Bytes read to compare copies of files on several nodes, at most 64 KiB a file; not part of `bytes_read`."""
    fallbacks: tuple[str, ...] = ()
    """Parameters whose sources were read completely, because their conversion has no lazy equivalent."""
    tp_shares: tuple[float, ...] | None = None
    """The share of each rank in every split; None: even."""
    shares_because: str = ""
    """Reason of `tp_shares`, if the load found them: measured numbers."""
    products: dict[str, int] = field(default_factory=dict)
    """Packed weights: name of the operator that multiplies them, or `decoded` -> their number."""

    @property
    def share(self) -> int:
        """Bytes that this rank holds."""
        return self.shares[self.rank]

    def __str__(self) -> str:
        shares = ", ".join(map(size, self.shares))
        ways = ", ".join(
            f"{size(nbytes)} {way} at {nbytes / seconds / 1e9:.1f} GB/s a thread"
            for way, (nbytes, _, seconds) in sorted(self.methods.items())
            if seconds
        )
        speed = self.share / self.seconds / 1e9 if self.seconds else 0.0
        notes = [
            f"rank {self.rank} of {len(self.shares)}: {size(self.share)} in {self.seconds:.2f} s ({speed:.1f} GB/s)",
            f"read {size(self.bytes_read)} in {self.reads} reads by {self.threads} threads" + f" ({ways})" * bool(ways),
            f"buffers {size(self.peak_buffer)}",
            f"shares {shares}",
        ]
        optional = {"mapped": self.mapped, "prefetched": self.prefetched, "sampled": self.sampled}
        notes += [f"{name} {size(nbytes)}" for name, nbytes in optional.items() if nbytes]
        notes += [f"{count} packed weights: {product}" for product, count in sorted(self.products.items())]
        if self.tp_shares is not None or self.shares_because:
            shares = " : ".join(f"{share:g}" for share in self.tp_shares) if self.tp_shares else "evenly"
            notes.append(f"split {shares}" + f" ({self.shares_because})" * bool(self.shares_because))
        if self.fallbacks:
            notes.append(f"{len(self.fallbacks)} parameters converted in full ({self.fallbacks[0]}, ...)")
        return "; ".join(notes)
