"""Record tests/data/grpc-descriptors-5.1.2.json: the messages, enums and methods of RocketMQ's Python client.

``python -m tests.golden.record_descriptors DIRECTORY`` with the directory into which `pip download --no-deps
rocketmq-python-client==5.1.2` and `unzip` have put the package `rocketmq`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tests.grpc.rpc.descriptors import described

TARGET = Path(__file__).parent.parent / "data" / "grpc-descriptors-5.1.2.json"


def main() -> None:
    """Import the generated modules only. The client's own package would import its many dependencies."""
    generated = Path(sys.argv[1], "rocketmq", "grpc_protocol")
    for name, path in (("rocketmq", generated.parent), ("rocketmq.grpc_protocol", generated)):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    sys.path.insert(0, str(generated))  # for the modules' imports of each other
    files = [import_module(name).DESCRIPTOR for name in ("definition_pb2", "service_pb2")]
    service = files[1].services_by_name["MessagingService"]
    methods = {
        method.name: [
            method.input_type.name, method.output_type.name, method.client_streaming, method.server_streaming
        ]
        for method in service.methods
    }  # fmt: skip
    lines = [
        f'"{name}": {json.dumps(value)}'
        for name, value in {**described(files), service.full_name: methods}.items()
    ]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
