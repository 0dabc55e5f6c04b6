"""The archive of `event_log`: one file of rows for each UTC day, and a manifest that says what is in it.

    <directory>/event_log/2026/11/29.ndjson.gz         one line a row, by seq
    <directory>/event_log/2026/11/29.manifest.json     rows, bytes, hashes; counts and hashes an organization and hour

A day is the day of `created_at`. What must stay true:
- what is read is what was written, to the byte of the JSON texts; a day of which any byte has changed is refused
  before the first of its rows is given out;
- at every moment a reader finds a whole day, the old one or the new one;
- memory is bounded by the organizations of a day, never by its rows.

Who may write, when, and which days leave the table is the archive worker's business.
"""

from afluente.archive.errors import Altered, ArchiveError, Incomplete, MissingDay, NotArchivable, Occupied
from afluente.archive.files import days, find, read, read_manifest, rewrite, write
from afluente.archive.format import Manifest

__all__ = [
    "Altered",
    "ArchiveError",
    "Incomplete",
    "Manifest",
    "MissingDay",
    "NotArchivable",
    "Occupied",
    "days",
    "find",
    "read",
    "read_manifest",
    "rewrite",
    "write",
]
