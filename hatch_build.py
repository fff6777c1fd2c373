"""Build hooks for hatchling, which add the package description and a bill of materials."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.requirements import Requirement


class ReadmeHook(MetadataHookInterface):
    """Sets `readme` to README.md, without links to files: a package page could not follow them."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class SbomHook(BuildHookInterface):
    """Adds a bill of materials to the wheel. It lists the required packages with their version ranges.

    The installed versions depend on the machine. The bill of `make dist` lists those of one installation.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version != "standard":
            return
        core = self.metadata.core
        this = f"pkg:pypi/{core.name}@{self.metadata.version}"
        needed = {f"pkg:pypi/{each.name}": each for each in map(Requirement, core.dependencies)}
        bom = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.7",
            "version": 1,
            "metadata": {
                "component": {
                    "type": "library",
                    "bom-ref": this,
                    "name": core.name,
                    "version": self.metadata.version,
                    "purl": this,
                    "licenses": [{"expression": core.license_expression}],
                }
            },
            "components": [
                {
                    "type": "library",
                    "bom-ref": purl,
                    "name": each.name,
                    "purl": purl,
                    "isExternal": True,
                    "versionRange": f"vers:pypi/{'|'.join(sorted(map(str, each.specifier)))}",
                }
                for purl, each in needed.items()
            ],
            "dependencies": [{"ref": this, "dependsOn": list(needed)}, *({"ref": purl} for purl in needed)],
        }
        path = Path(self.root) / "build" / f"{core.name}.cdx.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path.relative_to(self.root)))
