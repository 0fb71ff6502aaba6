"""Define torchvision's operators before it is imported.

The CPU build of vLLM brings a torch that the installed torchvision's compiled part does not match: its operators are
missing, and its Python part fails at import for want of their schemas. Nothing here computes with them.
"""

import sys
from importlib.abc import MetaPathFinder

_T, _I = "Tensor", "int"
_POOL = "Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width"
_SHAPE = "int batch_size, int channels, int height, int width"
_BACK = "Tensor grad, Tensor rois, {} float spatial_scale, int pooled_height, int pooled_width"
_DEFORM = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, int pad_h, "
    "int pad_w, int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask"
)
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"qroi_align({_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({_BACK.format('')}, {_SHAPE}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward({_BACK.format('Tensor argmax,')}, {_SHAPE}) -> Tensor",
    f"ps_roi_align({_POOL}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward({_BACK.format('Tensor channel_mapping,')}, int sampling_ratio, {_SHAPE}) -> Tensor",
    f"ps_roi_pool({_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward({_BACK.format('Tensor channel_mapping,')}, {_SHAPE}) -> Tensor",
    f"deform_conv2d({_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                self.library.define(schema)
            sys.modules.setdefault("_torchvision_schemas", self)  # a library's operators live as long as it does
        return


sys.meta_path.insert(0, _BeforeTorchvision())
