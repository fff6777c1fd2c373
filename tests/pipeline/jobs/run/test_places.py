"""Different spellings of paths that may name the same file or directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cometmq.pipeline.jobs.run.places import local_path, overlap, scheme_of


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with `real/deep` and a link `link` to `real`."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("real/deep")
    os.symlink("real", "link")
    os.symlink("link/deep", "far")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/a/b", "/a/b/"),
        ("/a/b", "/a/./c/../b/x"),
        ("/", "/a"),
        ("file:/a/b", "/a/b"),
        ("file:///a/b", "/a"),
        ("FILE://localhost/a/b", "file:/a/b"),
        ("file:///a%20b", "/a b"),
        ("real", "link/x"),
        ("link", "file:{cwd}/real"),
        ("far/new/table", "real/deep"),
        ("file:{cwd}/l*", "real/deep"),
        ("./*", "real/deep/new"),
        ("/a/*/store", "/a/b"),
        ("/a/*/store", "/a/b/store/x"),
        ("/a/b?/store", "/a/bc"),
        ("/a/[^x]", "/a/b/c"),
        ("/a/{{b,c}}/d", "/a/c/d"),
        ("/a/{{b,c/d}}", "/a/c/d/e"),
        ("/x,/a/b , /y", "/a/b/c"),
        ("/x,/a/{{b,c}},/y", "/a/c"),
        ("/a/x*", "/a/*y"),
        ("s3://bucket/a", "s3a://bucket/a/b"),
        ("s3://key:secret@bucket/a?region=x", "s3n://bucket/a"),
        ("gs://b/a", "gcs://b/a/"),
        ("abfss://box@host/a", "abfs://box@host/a/b"),
        ("hdfs://host:8020/a", "hdfs://host/a/b"),
        ("/a/" + "{{b,c}}" * 20, "/a/" + "b" * 20),
    ],
)  # fmt: skip
def test_places_that_may_be_one(one: str, other: str) -> None:
    one, other = one.format(cwd=os.getcwd()), other.format(cwd=os.getcwd())
    assert overlap(one, other)
    assert overlap(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/a/b", "/a/bc"),
        ("/a/b", "/a/c/b"),
        ("file:/a/b", "/a/c"),
        ("real", "linked"),
        ("/a/*/store", "/a/b/other"),
        ("/a/b*", "/a/c"),
        ("/a/{{b,c}}", "/a/d"),
        ("/x,/y", "/a"),
        ("s3://one/a", "s3://other/a"),
        ("s3://a/b", "/a/b"),
        ("hdfs://one/a", "hdfs://two/a"),
        ("hdfs://one/a", "hdfs://one:9000/a"),
        ("abfs://box@host/a", "abfs://other@host/a"),
    ],
)
def test_places_that_are_two(one: str, other: str) -> None:
    assert not overlap(one.format(), other.format())


@pytest.mark.parametrize(
    ("path", "local"),
    [("/a", "/a"), ("a b", "a b"), ("file:/a", "/a"), ("file://h/a", "/a"), ("s3://b", None)],
)
def test_a_path_of_this_machine(path: str, local: str | None) -> None:
    assert local_path(path) == local
    assert scheme_of(path) == ("s3" if local is None else None)
