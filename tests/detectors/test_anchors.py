"""Anchors computed by hand, the cache, and which anchors are valid."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.models.detection.anchor_utils import AnchorGenerator

from bucketrank.boxes import centres
from bucketrank.detectors.anchors import MAX_CACHED, Anchors, octave


def maps(strides, height, width, *, batch=1, dtype=torch.float32):
    """Return the feature maps of a padded image, with sizes rounded up as convolutions do."""
    return [torch.zeros(batch, 1, math.ceil(height / s), math.ceil(width / s), dtype=dtype) for s in strides]


class TestAnchors:
    def test_an_rpn_by_hand(self):
        anchors = Anchors([4], scales=[8], ratios=[0.5, 1, 2])
        (level,) = anchors([torch.zeros(1, 1, 2, 2)])
        # A side of 32: ratio 1/2 is sqrt(2) wider and sqrt(2) lower. None is rounded.
        w, h = 16 * math.sqrt(2), 16 / math.sqrt(2)
        cell = torch.tensor([[-w, -h, w, h], [-16, -16, 16, 16], [-h, -w, h, w]])
        shifts = torch.tensor([[0, 0], [4, 0], [0, 4], [4, 4]]).float().repeat(1, 2)  # along a row first
        torch.testing.assert_close(level, torch.cat([cell + shift for shift in shifts]))

    def test_scales_within_ratios(self):
        (level,) = Anchors([8], scales=[2, 4], ratios=[1, 4])([torch.zeros(1, 1, 1, 1)])
        assert (level[:, 2:] - level[:, :2]).tolist() == [[16, 16], [32, 32], [8, 32], [16, 64]]

    def test_three_scales_an_octave(self):
        assert octave(4, 3) == pytest.approx((4, 5.039684, 6.349604))
        assert octave(8, 1) == (8,)
        first, second = Anchors([8, 16], scales=octave(4, 3))(maps([8, 16], 16, 16))
        assert [len(first), len(second)] == [12, 3]
        torch.testing.assert_close(first[:3, 2], torch.tensor([16, 16 * 2 ** (1 / 3), 16 * 4 ** (1 / 3)]))
        torch.testing.assert_close(second, 2 * first[:3])

    def test_strides_are_exact_where_a_map_is_rounded_up(self):
        anchors = Anchors([128], scales=[1])
        feature_maps = maps([128], 256, 320)
        assert feature_maps[0].shape[-2:] == (2, 3)  # 320 / 128 = 2.5; 320 // 3 would be 106
        (level,) = anchors(feature_maps)
        assert centres(level).tolist() == [[0, 0], [128, 0], [256, 0], [0, 128], [128, 128], [256, 128]]

    def test_equal_to_torchvision_where_nothing_is_rounded(self):
        from torchvision.models.detection.image_list import ImageList

        ours = Anchors([8, 16], scales=[4], ratios=[1, 4])
        theirs = AnchorGenerator(((32,), (64,)), ((1.0, 4.0),) * 2)
        feature_maps = maps([8, 16], 64, 96)
        (expected,) = theirs(ImageList(torch.zeros(1, 3, 64, 96), [(64, 96)]), feature_maps)
        torch.testing.assert_close(torch.cat(ours(feature_maps)), expected, rtol=0, atol=0)
        assert isinstance(ours, AnchorGenerator)
        assert ours.num_anchors_per_location() == [2, 2]

    def test_half_precision_does_not_move_them(self):
        strides = [8]
        anchors = Anchors(strides, scales=[1])
        (level,) = anchors(maps(strides, 8, 4096, dtype=torch.float16))
        assert level.dtype == torch.float32
        assert centres(level)[:, 0].tolist() == list(range(0, 4096, 8))

    def test_nothing_to_train_and_nothing_to_save(self):
        anchors = Anchors([8], scales=[1])
        anchors(maps([8], 64, 64))
        assert list(anchors.state_dict()) == []

    @pytest.mark.parametrize(
        ("settings", "complaint"),
        [
            ({"strides": []}, "expected strides to be whole numbers of at least 1, got"),
            ({"strides": [8, 0]}, "expected strides"),
            ({"strides": [8.5]}, "expected strides"),
            ({"scales": []}, "expected scales to be numbers above 0, got"),
            ({"ratios": [1, -1]}, "expected ratios to be numbers above 0, got"),
            ({"size_divisor": 0}, "expected size_divisor to be at least 1, got 0"),
        ],
    )
    def test_bad_settings(self, settings, complaint):
        settings = {"strides": [8], "scales": [1], "ratios": [1]} | settings
        with pytest.raises(ValueError, match=f"^Anchors: {complaint}"):
            Anchors(settings.pop("strides"), **settings)

    def test_bad_arguments(self):
        anchors = Anchors([8, 16], scales=[1])
        with pytest.raises(ValueError, match="Anchors: expected 2 feature maps, one for each stride, got 1"):
            anchors(maps([8], 64, 64))
        with pytest.raises(ValueError, match=r"Anchors.valid: expected anchors of shape \(A, 4\)"):
            anchors.valid(torch.zeros(4), [(8, 8)])
        with pytest.raises(ValueError, match="octave: expected base above 0 and at least 1 step"):
            octave(4, 0)


class TestCache:
    def test_the_same_shapes_are_computed_once(self):
        anchors = Anchors([8], scales=[1])
        (first,) = anchors(maps([8], 64, 64))
        (other,) = anchors(maps([8], 64, 96))
        (again,) = anchors(maps([8], 64, 64, batch=3))
        assert again is first
        assert len(other) != len(first)

    def test_the_most_recently_used_are_kept(self):
        anchors = Anchors([8], scales=[1])
        firsts = [anchors(maps([8], 64, 8 * width))[0] for width in range(1, MAX_CACHED + 1)]
        assert anchors(maps([8], 64, 8))[0] is firsts[0]  # the oldest, asked for again
        anchors(maps([8], 64, 1000))
        assert anchors(maps([8], 64, 8))[0] is firsts[0]
        assert anchors(maps([8], 64, 16))[0] is not firsts[1]

    def test_anchors_made_in_inference_mode_can_be_trained_on(self):
        anchors = Anchors([8], scales=[1])
        with torch.inference_mode():
            anchors(maps([8], 64, 64))
        (level,) = anchors(maps([8], 64, 64))
        deltas = torch.ones_like(level, requires_grad=True)
        (deltas * level).sum().backward()
        torch.testing.assert_close(deltas.grad, level)

    def test_clearing_the_returned_list_leaves_the_cache(self):
        anchors = Anchors([8], scales=[1])
        anchors(maps([8], 64, 64)).clear()
        assert len(anchors(maps([8], 64, 64))) == 1


class TestValid:
    def test_padding_by_hand(self):
        # Two images in a batch padded to 64 x 96. Alone the second, 20 x 40, would be padded to 32 x 64.
        anchors = Anchors([16], scales=[1])
        every = torch.cat(anchors(maps([16], 64, 96)))
        valid = anchors.valid(every, [(64, 96), (20, 40)])
        assert valid.shape == (2, 24)
        assert valid[0].all()
        # Rows at y = 0, 16, 32, 48; columns at x = 0, 16, ..., 80. A centre at 32 or 64 lies on padding.
        assert valid[1].view(4, 6).tolist() == [[True] * 4 + [False] * 2] * 2 + [[False] * 6] * 2

    def test_the_divisor(self):
        anchors = Anchors([16], scales=[1], size_divisor=1)
        every = torch.cat(anchors(maps([16], 16, 64)))
        assert anchors.valid(every, [(16, 33), (16, 32)]).tolist() == [
            [True, True, True, False],
            [True, True, False, False],
        ]

    def test_rounding_moves_no_centre_across_the_edge(self):
        strides = [8, 16, 32, 64, 128]
        anchors = Anchors(strides, scales=octave(4, 3), ratios=[0.3, 1, 3.3])
        feature_maps = maps(strides, 1024, 1344)
        every = torch.cat(anchors(feature_maps))
        for size in [(1, 1), (480, 640), (800, 1333), (1000, 1000)]:
            padded = [math.ceil(side / 32) * 32 for side in size]
            expected = [
                row * stride < padded[0] and column * stride < padded[1]
                for stride, level in zip(strides, feature_maps, strict=True)
                for row in range(level.shape[2])
                for column in range(level.shape[3])
                for _ in range(9)
            ]
            assert anchors.valid(every, [size])[0].tolist() == expected

    def test_the_border(self):
        # Squares of 16 around x = 0, 8, ..., 56 and y = 8, in images 17 high and 40 or 41 wide.
        every = torch.cat(Anchors([8], scales=[2])(maps([8], 16, 64)))[8:]
        sizes = [(17, 40), (17, 41)]
        inside = Anchors([8], scales=[2], border=0).valid(every, sizes)
        # 0..16 touches the left and the upper edge, which is allowed; 24..40 touches the right edge, which is not.
        assert inside[0].tolist() == [False, True, True, True, False, False, False, False]
        assert inside[1].tolist() == [False, True, True, True, True, False, False, False]
        assert not Anchors([8], scales=[2], border=0).valid(every, [(16, 41)]).any()  # all touch the lower edge
        eight = Anchors([8], scales=[2], border=8).valid(every, sizes)
        assert eight[0].tolist() == [True] * 5 + [False] * 3
        # Centres at 0 to 56 are all on the image padded to 64.
        assert Anchors([8], scales=[2]).valid(every, sizes).all()

    def test_no_images(self):
        anchors = Anchors([16], scales=[1])
        assert anchors.valid(torch.cat(anchors(maps([16], 64, 96))), []).shape == (0, 24)
