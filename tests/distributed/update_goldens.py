"""Records what the engine computes: `python -m tests.distributed.update_goldens`. Do it only where a change of bits or bytes is meant, and say which.

With `--check` nothing is written: what differs from the records is printed.
"""

from __future__ import annotations

import sys

import torch

from tests.distributed.golden_cases import BATCHES
from tests.distributed.goldens import BYTES, Record, bits_file, differences, read_bits, read_bytes, record, write


def main() -> int:
    torch.set_num_threads(1)
    bits: Record = {}
    nbytes: Record = {}
    for label, cases in BATCHES.items():
        print(f"{label}: {len(cases)} cases", flush=True)
        more_bits, more_bytes = record(cases)
        bits |= more_bits
        nbytes |= more_bytes
    if "--check" not in sys.argv[1:]:
        write(bits, nbytes)
        print(f"wrote {bits_file().name} and {BYTES.name}")
        return 0
    recorded, reason = read_bits()
    texts = [reason] if reason else differences(recorded, bits, "bits")
    texts += differences(read_bytes(), nbytes, "bytes")
    print("\n".join(texts) or "as recorded")
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
