"""vLLM's OpenAI server with two adapters at once: `python -m tests.hosts.vllm.serve FOLDER [OPTION…]`.

The server runs in its own processes (front, engine), as `vllm serve` starts them.
"""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.hosts.vllm.media import picture

PORT = int(os.environ.get("POLYLENS_TEST_PORT", "8341"))
START_S = 300
MAX_LOGPROB_ERROR = 1e-3


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    arguments = ["--worker-cls", "polylens.hosts.vllm.Worker", "--enable-lora", "--max-loras", "4"]
    arguments += ["--lora-modules", f"a={folder / 'a'}", f"l={folder / 'l'}", "--enforce-eager", "--dtype", "float32"]
    arguments += ["--max-model-len", "1024", "--port", str(PORT), "--host", "127.0.0.1", "--served-model-name", "base"]
    arguments += options
    # As `vllm serve` does; that command of vllm-cpu 0.32.0 ends at once, for it looks for a package named vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=sys.stdout, stderr=subprocess.STDOUT)


def post(path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_for(server: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit("the server did not start")


def question(name: str, index: int) -> dict[str, Any]:
    file = io.BytesIO()
    picture(index).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    texts = ("what is in the picture?", "name the colour")
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": texts[index]}]
    body = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return body | {"logprobs": True, "ignore_eos": True}


def ask(name: str, index: int) -> list[float]:
    """Log-probabilities of the answer's tokens."""
    status, answer = post("/v1/chat/completions", question(name, index))
    assert status == 200, answer
    return [token["logprob"] for token in json.loads(answer)["choices"][0]["logprobs"]["content"]]


def unfit(folder: Path) -> Path:
    """An adapter with a tensor of a layer that the model does not have."""
    place = folder / "unfit"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "a", place)
    tensors = load_file(place / "adapter_model.safetensors")
    tensors["base_model.model.model.no.such.layer.lora_A.weight"] = torch.zeros(4, 8)
    save_file(tensors, place / "adapter_model.safetensors")
    return place


def is_right(answers: Any, name: str, index: int, logprobs: Sequence[float]) -> None:
    token_ids, expected = answers[name, "image", index]
    theirs = [expected[i, token].item() for i, token in enumerate(token_ids)]
    error = max(abs(one - other) for one, other in zip(logprobs, theirs, strict=True))
    assert error <= MAX_LOGPROB_ERROR, f"{name} {index}: off by {error}"


def leave(name: str, index: int) -> None:
    """Ask, and go before the answer comes."""
    body = json.dumps(question(name, index)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        time.sleep(0.05 * index)


def load(name: str, path: Path, **more: Any) -> tuple[int, str]:
    return post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def check(folder: Path) -> None:
    answers = torch.load(folder / "answers.pt", weights_only=False)["answers"]
    wanted = [(name, index) for _ in range(3) for index in (0, 1) for name in ("base", "a", "l")]
    with concurrent.futures.ThreadPoolExecutor(2 * len(wanted)) as pool:
        for (name, index), logprobs in zip(wanted, pool.map(lambda one: ask(*one), wanted), strict=True):
            is_right(answers, name, index, logprobs)
        print(f"ok {len(wanted)} answers of base and two adapters at once", flush=True)
        list(pool.map(lambda one: leave(*one), wanted))
        is_right(answers, "a", 0, ask("a", 0))
        print("ok clients that left", flush=True)
        status, said = load("v", folder / "v")
        assert status == 200, said
        coming = [pool.submit(ask, "v", index % 2) for index in range(12)]
        is_right(answers, "v", 0, ask("v", 0))
        status, said = post("/v1/unload_lora_adapter", {"lora_name": "v"})
        assert status == 200, said
        found = [(index % 2, one.result()) for index, one in enumerate(coming) if one.exception() is None]
        for index, logprobs in found:
            is_right(answers, "v", index, logprobs)
        assert post("/v1/chat/completions", question("v", 0))[0] == 404
        print(f"ok an adapter removed while {len(found)} requests of it ran", flush=True)
    status, said = load("v", folder / "v")
    assert status == 200, said
    is_right(answers, "v", 1, ask("v", 1))
    status, said = load("v", folder / "a", load_inplace=True)
    assert status == 200, said
    is_right(answers, "a", 1, ask("v", 1))
    print("ok an adapter replaced under its name", flush=True)
    status, said = load("n", unfit(folder))
    assert 400 <= status < 600, said
    assert "no.such.layer" in said, said
    print(f"ok an adapter that cannot be applied is refused: {status}", flush=True)
    is_right(answers, "a", 1, ask("a", 1))
    print("ok the server goes on", flush=True)


def main(folder: Path, *options: str) -> int:
    server = start(folder, *options)
    try:
        wait_for(server)
        check(folder)
    finally:
        server.terminate()
        server.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
