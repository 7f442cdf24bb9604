"""JobSet's CRD as an API server reads it: its structural schema, and its rules in CEL.

It comes from a checkout of kubernetes-sigs/jobset that PPCTL_JOBSET names (`make test-jobset JOBSET=DIR`): no package
has it, and nothing of it lies in this repository.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = os.environ.get("PPCTL_JOBSET")
_FILE = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
Rule = tuple[str, str]
"""The place of what a rule is about, such as `spec.network` or `spec.replicatedJobs[].dependsOn`, and its CEL."""


class Crd:
    """The CRD's `v1alpha2`, which a checkout has."""

    def __init__(self, checkout: Path) -> None:
        versions = yaml.safe_load((checkout / _FILE).read_text())["spec"]["versions"]
        (served,) = [each for each in versions if each["name"] == "v1alpha2"]
        self.schema = served["schema"]["openAPIV3Schema"]

    def rules(self) -> list[Rule]:
        """All its rules in CEL."""
        return [*_rules(self.schema, "")]

    def problems(self, made: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
        """What it refuses `made` for, or loses of it; in place of `before`, if that is there."""
        from jsonschema import Draft202012Validator

        found = Draft202012Validator(_closed(self.schema)).iter_errors(made)
        return [*(f"{error.json_path}: {error.message}" for error in found), *_broken(self.schema, made, before, "")]


def _rules(schema: dict[str, Any], where: str) -> Iterator[Rule]:
    for each in schema.get("x-kubernetes-validations", ()):
        yield where, each["rule"]
    for name, below in schema.get("properties", {}).items():
        yield from _rules(below, f"{where}.{name}".lstrip("."))
    for below in filter(None, (schema.get("items"), schema.get("additionalProperties"))):
        yield from _rules(below, f"{where}[]")


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as JSON Schema, by which a field that it does not know, and a server would drop, is an error."""
    made = {**schema}
    if "properties" in schema:
        made["properties"] = {name: _closed(below) for name, below in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            made[key] = _closed(schema[key])
    if schema.get("x-kubernetes-list-type") == "set":
        made["uniqueItems"] = True
    return made


def _broken(schema: dict[str, Any], value: Any, before: Any, where: str) -> Iterator[str]:
    """The rules that `value` breaks; those about a change where there is a value before."""
    import celpy
    from celpy.adapter import json_to_cel

    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] or before is not None:
            environment = celpy.Environment()
            program = environment.program(environment.compile(rule["rule"]))
            if not program.evaluate({"self": json_to_cel(value), "oldSelf": json_to_cel(before)}):
                yield f"{where}: {rule['message']}"
    for name, below in schema.get("properties", {}).items():
        if name in value:
            yield from _broken(below, value[name], (before or {}).get(name), f"{where}.{name}".lstrip("."))
    if "items" in schema:
        old = before or []
        for number, each in enumerate(value):
            beside = old[number] if number < len(old) else None
            yield from _broken(schema["items"], each, beside, f"{where}[{number}]")
