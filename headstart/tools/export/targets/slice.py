"""A smaller model inside a checkpoint of nested models, as a checkpoint of its own."""

from headstart.errors import UsageError
from headstart.formats import open_checkpoint
from headstart.formats.safetensors import CONFIG, Planned, copied
from headstart.formats.safetensors_file import INDEX
from headstart.models.slices import sliced
from headstart.tools.export.plan import Plan, as_json, index_text
from headstart.tools.export.source import ExportRequest, side_files


def plan(request: ExportRequest) -> Plan:
    """Plans the directory, with the file names of the source. Raises UsageError or ModelError."""
    if request.slice is None:
        raise UsageError("--to slice needs the config of the smaller model", "give --slice CONFIG")
    source = sliced(open_checkpoint(request.path), request.slice)
    files: dict[str, tuple[Planned, ...]] = {}
    for name, tensor in source.tensors.items():
        files[tensor.file.name] = (*files.get(tensor.file.name, ()), copied(name, tensor))
    texts = {CONFIG: as_json(source.config) + "\n"}
    copies = {name: path for name, path in side_files(source.path).items() if name not in (CONFIG, INDEX)}
    if len(files) > 1:
        texts[INDEX] = index_text({each.name: file for file, planned in files.items() for each in planned})
    return Plan({**files}, {"format": "pt"}, texts, copies, use="headstart serve {out}", is_model=True)


EXPORT = plan
