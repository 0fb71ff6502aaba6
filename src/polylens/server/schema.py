"""The bodies of requests, as types.

What a field's type allows is what polylens honours. A field OpenAI's clients send that polylens does not apply
is here with the one value that asks for nothing; any field may be null, which asks for nothing too. Everything
else is refused by name: nothing that would change the answer is accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from polylens.core import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from polylens.server.options import MAX_CHOICES

MAX_TOP_LOGPROBS = 20
"""OpenAI's own bound."""

MAX_STOPS = 16
"""OpenAI takes 4, vLLM any number; each one costs a search a token."""

MAX_INT = 2**63 - 1

MAX_NAME_CHARS = 512
"""Longest name of a model or adapter in a body: a hub id, or an adapter's name."""


class Body(BaseModel):
    """A JSON object of known fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item for name, item in value.items() if item is not None}
        return value


class Url(Body):
    url: str
    detail: Literal["auto"] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


def _url_form(value: Any) -> str:
    return "plain" if isinstance(value, str) else "object"


AnyUrl = Annotated[Annotated[str, Tag("plain")] | Annotated[Url, Tag("object")], Discriminator(_url_form)]
"""`{"url": …}` as OpenAI has it, or the address alone."""


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: AnyUrl


class VideoPart(Body):
    type: Literal["video_url"]
    video_url: AnyUrl


Part = Annotated[TextPart | ImagePart | VideoPart, Discriminator("type")]


def _content_form(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")], Discriminator(_content_form)]

UNION_TAGS = frozenset(
    {
        "plain",
        "object",
        "text",
        "parts",
        "image_url",
        "video_url",
        "json_object",
        "json_schema",
        "ids",
        "texts",
        "one",
        "str",
        "int",
    }
)
"""What pydantic puts into an error's place beside the fields: the branch of a union it took."""


class Message(Body):
    """One turn. `name`, `tool_calls` and the like are for the model's chat template to use."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Discriminator("type")]


class StructuredOutputs(Body):
    """vLLM's form of a constraint: exactly one of the three."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class MediaSettings(Body):
    """`mm_processor_kwargs`: how pictures and videos are taken apart, for this request only."""

    min_pixels: int | None = Field(None, ge=1, le=MAX_INT)
    max_pixels: int | None = Field(None, ge=1, le=MAX_INT)
    fps: float | None = Field(None, gt=0)
    num_frames: int | None = Field(None, ge=1, le=MAX_INT)


class SamplingFields(Body):
    """What chat and plain completions have in common. What a request leaves out is as `--generation-config` says."""

    model: str = Field(max_length=MAX_NAME_CHARS)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, lt=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=0, le=MAX_INT)
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_INT)]] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    mm_processor_kwargs: MediaSettings | None = None
    deadline_s: float | None = Field(None, gt=0)
    request_id: str | None = Field(None, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._:/-]+$")  # it is logged

    # Without effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    priority: Literal[0] | None = None
    best_of: Literal[1] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    # Without effect on the answer.
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    echo: Literal[False] | None = None
    include_reasoning: bool | None = None


Ids = list[Annotated[int, Field(ge=0, le=MAX_INT)]]


def _prompt_form(value: Any) -> str:
    if isinstance(value, str):
        return "one"
    return "ids" if isinstance(value, list) and value and isinstance(value[0], int) else "texts"


Prompt = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[str | Ids], Field(min_length=1, max_length=MAX_CHOICES), Tag("texts")],
    Discriminator(_prompt_form),
]


class CompletionBody(SamplingFields):
    """POST /v1/completions: a prompt as it is, without a chat template."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    # Without effect on the answer.
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: Literal[True] | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    add_special_tokens: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None


class LoadBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    pinned: bool = False
    prefetch: bool = False


class UnloadBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    lora_int_id: int | None = None
