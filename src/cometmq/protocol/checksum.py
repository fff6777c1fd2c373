"""The CRC-32 (zlib's polynomial) of records and registrations, which store it with the top bit cleared.

If the package ISA-L is installed, it computes the CRC by the processor's carry-less multiplication: in 0.05
µs for 1 KiB and 1.2 µs for 64 KiB. zlib 1.2 takes 0.37 µs and 15 µs.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
