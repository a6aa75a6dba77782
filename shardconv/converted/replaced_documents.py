"""Replace the plan or the manifest of a converted directory, on a disk or in an object store."""

from __future__ import annotations

from shardconv_runtime.errors import SourceError
from shardconv_runtime.files.converted_files import ConvertedFiles
from shardconv_runtime.format.typed_json import write_text
from shardconv_runtime.hub_options import again


def replace_document(files: ConvertedFiles, name: str, text: str) -> None:
    """Replace a small file atomically; one in a store only if it is as it was read.

    Raises:
        SourceError: somebody has changed it meanwhile, or the store refuses.
        OSError: it cannot be written on this machine.
    """
    if files.objects is None:
        write_text(files.directory / name, text)
        return
    from ..writing.store_objects import StoreDirectory  # it imports the client of the Hub

    store = StoreDirectory(files.objects.url)
    record = store.read(name)
    was_read = record is not None and record.data == (files.directory / name).read_bytes()
    if record is None or not was_read or store.replace(name, text.encode(), record.version) is None:
        raise SourceError(f"{files.name}/{name} was changed by another process meanwhile; {again()}")
