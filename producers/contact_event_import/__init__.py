"""Contact events from a file: read, judged row by row, recorded batch by batch.

`reading` knows files and lines, `rows` what a row means, `importing` Postgres.
"""

from producers.contact_event_import.importing import Options, Result, imports, run, write_rejected
from producers.contact_event_import.reading import Format, Source

__all__ = ["Format", "Options", "Result", "Source", "imports", "run", "write_rejected"]
