"""Names of files: each place has one of its own below the root, and only such names are read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.backends import posix_layout as layout
from dataplane.port import Place

TOKEN = "0123456789abcdef"
places = st.builds(
    Place,
    cluster=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"),
    location=st.integers(0, 2**64 - 1),
    generation=st.integers(1, 2**32 - 1),
    part=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}\Z"),
    size_bytes=st.just(0),
    key=st.just(b""),
)


@given(places)
def test_a_name_is_read_back_as_its_place(place: Place) -> None:
    cluster, folder, name = layout.path_of("/r", place).removeprefix("/r/").split("/")
    assert layout.is_cluster(cluster)
    assert layout.is_folder(folder)
    assert not layout.is_temporary(name)
    assert layout.parse(cluster, folder, name) == place
    assert len(name.encode()) <= 255


@given(places, st.integers(0, 2**22), st.integers(0, 2**40))
def test_a_temporary_name_is_read_back_as_where_it_was_going(place: Place, pid: int, number: int) -> None:
    path = layout.temporary_of("/r", place, TOKEN, pid, number)
    cluster, folder, name = path.removeprefix("/r/").split("/")
    assert layout.folder_of("/r", place) == f"/r/{cluster}/{folder}"
    assert layout.is_temporary(name)
    assert layout.parse(cluster, folder, name) == place._replace(part="")
    assert len(name.encode()) <= 255


@given(places, places)
def test_two_places_never_share_a_name(a: Place, b: Place) -> None:
    assert (layout.path_of("/r", a) == layout.path_of("/r", b)) == (a == b)


GOOD = "0000000000000134-7.tp0"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("33", GOOD),  # the folder is not the one of this location
        ("34", GOOD.upper().replace(".TP", ".tp").replace("134", "1A4")),
        ("34", "134-7.tp0"),
        ("34", "0000000000000134-07.tp0"),
        ("34", "0000000000000134-0.tp0"),
        ("34", "0000000000000134-4294967296.tp0"),
        ("34", "0000000000000134-7"),
        ("34", "0000000000000134-7."),
        ("34", "0000000000000134-7..hidden"),
        ("34", "0000000000000134-7.tp 0"),
        ("34", "0000000000000134-7.tp0\n"),
        ("34", "0000000000000134-٧.tp0"),
        ("34", "x" + GOOD),
        ("34", ".nfs0000000000000134"),
        ("34", ".tmp-0000000000000134-7"),
        ("34", f".tmp-0000000000000134-7-{TOKEN}-1"),
        ("34", f".tmp-0000000000000134-7-{TOKEN}-1-1x"),
        ("34", f".tmp-0000000000000134-7-{TOKEN[:15]}-1-1"),
        ("33", f".tmp-0000000000000134-7-{TOKEN}-1-1"),
        ("34", ""),
    ],
)
def test_foreign_names_are_not_taken_for_ours(folder: str, name: str) -> None:
    assert layout.parse("c", "34", GOOD) == Place("c", 0x134, 7, "tp0")
    assert layout.parse("c", folder, name) is None


@pytest.mark.parametrize("name", ["", "..", ".", ".snapshot", "a b", "a/b", "lost+found", "x" * 129])
def test_folders_that_are_no_clusters(name: str) -> None:
    assert not layout.is_cluster(name)


@pytest.mark.parametrize("name", ["", "0", "000", "0G", "AB", "a\n", ".."])
def test_folders_that_hold_no_places(name: str) -> None:
    assert not layout.is_folder(name)
