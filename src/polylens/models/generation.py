"""transformers' own `generate`, one token at a time.

`generate` takes a decoding method of the caller's (`custom_generate`): it prepares everything a family needs (the
encoder of an encoder-decoder, caches, masks, positions) and hands over. Ours is a Python generator: it gives the
logits of the next token, and goes on when it is sent the token that was chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence


def generation_steps(
    model: Any, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor], max_new_tokens: int
) -> Generator[torch.Tensor, int, None]:
    """Begin to generate after the prompt `token_ids`.

    inputs: what the model's processor returned beside the ids (pixels, masks, token types). An encoder runs here
    already; the rest of the prompt with the first `next`. max_new_tokens: most tokens that will be sent. Raises
    whatever transformers raises for inputs that the model cannot take.
    """
    device, dtype = model.device, model.dtype
    moved = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()}
    return model.generate(
        **{**_prompt(model, torch.tensor([list(token_ids)], device=device)), **moved},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        custom_generate=_one_by_one,
    )


def _prompt(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The prompt's (1, n) ids under the name the model takes them: the decoder's, where only pictures are encoded."""
    encodes_text = model.main_input_name == "input_ids" or hasattr(model, "get_image_features")
    if model.config.is_encoder_decoder and not encodes_text:
        return {"decoder_input_ids": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _one_by_one(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **arguments: Any,
) -> Generator[torch.Tensor, int, None]:
    """The loop of transformers' `_sample` for one sequence, with the choice of tokens left to whoever drives it."""
    is_encoder_decoder = model.config.is_encoder_decoder
    forced = generation_config.forced_bos_token_id if is_encoder_decoder else None
    outputs = model._prefill(input_ids, generation_config, arguments)
    while True:
        arguments = model._update_model_kwargs_for_generation(outputs, arguments, is_encoder_decoder=is_encoder_decoder)
        if forced is not None:  # the answer's frame, like the token the decoder starts with: nothing to choose
            token_id, forced = forced, None
        else:
            token_id = yield outputs.logits[0, -1].to(torch.float32, copy=True)
        input_ids = torch.cat([input_ids, input_ids.new_tensor([[token_id]])], dim=1)
        inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **arguments)
        outputs = model(**inputs, return_dict=True)
