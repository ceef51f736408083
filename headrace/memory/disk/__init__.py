"""Where do the bytes of the disk tier lie, and how do they come and go? See docs/design/disk.md."""

from headrace.memory.disk.bounce import neighbours_follow, read_bytes, write_bytes
from headrace.memory.disk.checkpoint import LEAST_READING_BYTES, Checkpoint, Part
from headrace.memory.disk.extent import DISK_ALIGNMENT_BYTES, Extent, disk_pages
from headrace.memory.disk.file import DirectFile
from headrace.memory.disk.log import DiskLog
from headrace.memory.disk.mapping import Mapping, Origin, copy_on_disk, origin_of, release_pages
from headrace.memory.disk.newborn import TensorsOnDisk
from headrace.memory.disk.requests import Access, Ended, Request
from headrace.memory.disk.saved_file import SavedFile, TensorAtRest, TensorInFile, new_pages
from headrace.memory.disk.staging import Slot, StagingRing
from headrace.memory.disk.store import DiskStore

__all__ = [
    "DISK_ALIGNMENT_BYTES",
    "LEAST_READING_BYTES",
    "Access",
    "Checkpoint",
    "DirectFile",
    "DiskLog",
    "DiskStore",
    "Ended",
    "Extent",
    "Mapping",
    "Origin",
    "Part",
    "Request",
    "SavedFile",
    "Slot",
    "StagingRing",
    "TensorAtRest",
    "TensorInFile",
    "TensorsOnDisk",
    "copy_on_disk",
    "disk_pages",
    "neighbours_follow",
    "new_pages",
    "origin_of",
    "read_bytes",
    "release_pages",
    "write_bytes",
]
