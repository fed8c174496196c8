"""A packed row carries each image that its tokens show once, and where each of these stands."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_async.trainer.packing.flops import DecoderFlops, TowerFlops
from areal_async.trainer.packing.images import row_costs, with_images
from areal_async.trainer.packing.rows import PackedImages, TrainRow, empty_row, pack_rows
from areal_async.vision.pixels import patches
from areal_async.vision.spec import VisionSpec
from tests.unit.trainer.seeing import IMAGE, png, save_seeing_model, seeing_row

CPU = torch.device("cpu")
SMALL = 8
"""Pixels along the side of an image of one token."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> VisionSpec:
    spec = VisionSpec.read(save_seeing_model(tmp_path_factory.mktemp("model"), "qwen3_vl"))
    assert spec is not None
    return spec


def packed(rows: list[list[TrainRow]], spec: VisionSpec) -> list[PackedImages]:
    """Return what each packed row shows; one without sequences is empty."""
    laid_out = [pack_rows(own, CPU) if own else empty_row(CPU) for own in rows]
    images = [row.images for row in with_images(laid_out, rows, spec)]
    return [one for one in images if one is not None]


def test_an_image_is_there_once_however_many_sequences_of_the_row_show_it(spec: VisionSpec) -> None:
    """Siblings that come from another rank bring equal bytes, and not the same."""
    shared, own = png(0, width=8, height=16), png(1, width=SMALL, height=SMALL)
    siblings = [seeing_row(images, index=0) for images in ([shared], [own, bytes(bytearray(shared))], [shared])]

    (images,) = packed([siblings], spec)

    assert [len(one) for one in images.patches] == [8, 4]
    assert np.array_equal(images.patches[0].numpy(), patches(shared, spec))
    assert images.grids_N3.tolist() == [[1, 4, 2], [1, 2, 2]]
    # The shared one's tokens are 0 and 1 of all, that of the other is 2.
    assert images.shown_I.tolist() == [0, 1, 2, 0, 1, 0, 1]


def test_what_shows_an_image_stands_where_its_placeholders_do(spec: VisionSpec) -> None:
    rows = [seeing_row([], index=0), seeing_row([png(0), png(1)], index=1)]
    (row,) = with_images([pack_rows(rows, CPU)], [rows], spec)
    assert row.images is not None

    assert row.images.at_I.tolist() == torch.nonzero(row.token_ids_T == IMAGE)[:, 0].tolist()


def test_positions_start_anew_in_each_document_and_go_round_an_image(spec: VisionSpec) -> None:
    rows = [seeing_row([], index=0, length=2), seeing_row([png(0, width=16, height=SMALL)], index=1, length=1)]

    (images,) = packed([rows], spec)

    assert images.position_ids_4T.tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 0, 1, 2, 2, 4, 5],
        [0, 1, 2, 0, 1, 2, 2, 4, 5],
        [0, 1, 2, 0, 1, 2, 3, 4, 5],
    ]


def test_a_row_that_shows_nothing_has_a_blank_image_that_no_token_shows(spec: VisionSpec) -> None:
    """Rows of text and empty ones: a tower that is sharded runs in all of a call's rows, or in none."""
    for images in packed([[seeing_row([], index=0)], []], spec):
        assert [tuple(one.shape) for one in images.patches] == [(4, 96)]
        assert images.grids_N3.tolist() == [[1, 2, 2]]
        assert not len(images.at_I)
        assert not len(images.shown_I)


def test_rows_share_what_their_images_cost_and_text_has_no_part_of_it(spec: VisionSpec) -> None:
    """As if those that show an image shared a packed row, where it is encoded once."""
    tower = TowerFlops(per_patch=100, per_token=0, per_pair=1, merge_size=2)
    flops = DecoderFlops(per_token=1, per_scored_token=0, per_pair=0, tower=tower)
    shared, own = png(0), png(1, width=SMALL, height=SMALL)
    rows = [seeing_row(images, index=index) for index, images in enumerate([[], [shared], [shared, own, own]])]
    text = [row.num_tokens for row in rows]

    # 24 patches and 4.
    assert row_costs(rows, flops, spec) == [text[0], text[1] + 1488, text[2] + 1488 + 416]
    assert row_costs(rows, replace(flops, tower=None), spec) == text


def test_other_images_than_the_tokens_say_are_refused(spec: VisionSpec) -> None:
    row = seeing_row([png(0)], index=0)
    for images, message in (
        ((), "got 0 images, need 1"),
        ((png(0), png(1)), "got 2 images, need 1"),
        ((png(0, width=SMALL, height=SMALL),), "got 6 placeholders .* need 1"),
        ((b"no image",), "no whole PNG"),
    ):
        with pytest.raises(ValueError, match=message):
            packed([[replace(row, images=images)]], spec)
