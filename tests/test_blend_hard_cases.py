"""Uses that once gave a wrong blend, a wrong report or an unclear error."""

import os
import threading

import pytest
import torch
from families import random_ids, tiny_model
from test_blended_cache import PREFIX, full_logits, next_logits, prefill, row, same_kv
from transformers import DynamicCache

from anchor_cache import BlendedCache, ChunkStore, segments_from_chat
from anchor_cache.model_identity import model_identity

ROPE = {
    "linear": dict(rope_type="linear", factor=2.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "yarn": dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=40),
    "longrope": dict(
        rope_type="longrope",
        short_factor=[1.0] * 6,
        long_factor=[1.0, 2, 3, 4, 5, 6],
        original_max_position_embeddings=40,
        factor=4.0,
    ),
    "llama3": dict(
        rope_type="llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=40,
    ),
}


@pytest.fixture
def documents():
    return [row(19), row(30)]


@pytest.mark.parametrize("kind", ROPE)
def test_every_rope_type_beyond_its_first_table(tmp_path, documents, kind):
    """Some tables change with the length of the prompt: what was encoded with shorter ones is
    not exact, even where its context is the real one."""
    limit = dict(max_position_embeddings=40) if kind == "dynamic" else {}
    model = tiny_model(rope_parameters=dict(rope_theta=1e4, **ROPE[kind]), **limit)
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    store.add(documents, progress=False)
    segments = [PREFIX, *documents, row(8)]
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    same_kv(blended, prefill(model, sum(segments, [])[:-1]), 1e-4)
    assert blended.report().exact_prefix_tokens == (0 if kind in ("dynamic", "longrope") else 24)
    reused = BlendedCache.blend(model, store, segments, recompute_ratio=0)
    fresh = prefill(model, sum(segments, [])[:-1])
    torch.testing.assert_close(reused.layers[0].keys, fresh.layers[0].keys, atol=1e-5, rtol=1e-5)


def changed(model, how):
    weight = model.model.layers[1].self_attn.q_proj.weight
    if how == "scaled":
        weight.mul_(1.3)
    elif how == "one number":
        weight[3, 5] += 0.5
    elif how == "columns":
        weight[:, 1:] *= -1
    elif how == "rows swapped":
        weight[[0, 1]] = weight[[1, 0]].clone()
    elif how == "one embedding":
        model.get_input_embeddings().weight[17] = 0
    elif how == "dtype":
        model.to(torch.bfloat16)
    return model


@pytest.mark.parametrize(
    "how", ["scaled", "one number", "columns", "rows swapped", "one embedding", "dtype"]
)
def test_weights_changed_after_the_store_was_made_are_another_model(tmp_path, documents, how):
    model = tiny_model()
    before = model_identity(model)
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    store.add(documents, progress=False)
    changed(model, how)
    assert model_identity(model) != before
    segments = [PREFIX, *documents, row(4)]
    report = BlendedCache.blend(model, store, segments).report()
    assert report.reused_tokens == 0 and report.reasons == {"chunk not in the store": 3}
    store.add(documents, progress=False)
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    assert blended.report().reused_tokens == 54
    tolerance = 0.1 if how == "dtype" else 1e-4
    torch.testing.assert_close(
        next_logits(model, blended), full_logits(model, segments), atol=tolerance, rtol=tolerance
    )


def test_what_a_model_returns_is_no_part_of_its_identity():
    one, other = tiny_model(), tiny_model()
    other.config.output_hidden_states, other.config.pad_token_id = True, 5
    assert model_identity(one) == model_identity(other)


def test_training_mode_is_refused(tmp_path, documents):
    model = tiny_model(attention_dropout=0.3)
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    store.add(documents[:1], progress=False)
    model.train()
    with pytest.raises(ValueError, match=r"training mode: call model.eval\(\)"):
        ChunkStore(tmp_path, model)
    with pytest.raises(ValueError, match=r"training mode: call model.eval\(\)"):
        store.add(documents, progress=False)
    with pytest.raises(ValueError, match=r"training mode: call model.eval\(\)"):
        BlendedCache.blend(model, store, [*documents, row(3)])


def test_missing_documents_are_not_taken_for_the_question(tmp_path, documents):
    """The query selector looks with the question alone, and over what was reused."""
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    more = [row(25), row(25)]
    store.add([*documents, *more], progress=False)
    question = row(6)
    computed = []
    layer = model.model.layers[0]
    hook = layer.register_forward_hook(lambda m, args, out: computed.append(out.shape[1]))
    segments = [PREFIX, *documents, row(40), *more, question]
    blended = BlendedCache.blend(model, store, segments, selector="query")
    hook.remove()
    dry_run, listening, rows = computed
    assert listening == 5 and rows == 40 + 5 + len(blended.report().selected)
    ratio_1 = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    torch.testing.assert_close(
        next_logits(model, ratio_1), full_logits(model, segments), atol=1e-4, rtol=1e-4
    )


def test_selector_none_is_full_reuse_whatever_the_ratio(tmp_path, documents):
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    store.add(documents, progress=False)
    segments = [PREFIX, *documents, row(4)]
    report = BlendedCache.blend(model, store, segments, selector="none", recompute_ratio=1).report()
    assert report.recomputed_tokens == [0] * 4


@pytest.mark.parametrize("damage", ["cut", "junk", "layers", "no layers", "folder"])
def test_damaged_chunks_are_misses_and_heal(tmp_path, documents, damage):
    from safetensors.torch import load_file, safe_open, save_file

    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    key = store.add(documents, progress=False)[1]
    path = tmp_path / f"{key.digest}.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = {**file.metadata(), "layers": "2"}
    path.unlink()
    if damage == "cut":
        save_file(tensors, path)
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "junk":
        path.write_bytes(b"junk")
    elif damage == "folder":
        path.mkdir()
    else:
        header = header if damage == "layers" else {**header, "layers": ""}
        save_file(tensors, path, metadata=header)
    segments = [PREFIX, *documents, row(4)]
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    (reason,) = blended.report().reasons
    assert "damaged" in reason or "cannot be read" in reason
    torch.testing.assert_close(
        next_logits(model, blended), full_logits(model, segments), atol=1e-4, rtol=1e-4
    )
    if damage == "folder":
        path.rmdir()
    BlendedCache.blend(model, store, segments, add_missing=True)
    assert BlendedCache.blend(model, store, segments).report().reasons == {}


def test_chunk_files_have_ordinary_permissions(tmp_path, documents):
    store = ChunkStore(tmp_path, tiny_model(), prefix=PREFIX)
    (key,) = store.add(documents[:1], progress=False)
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    mode = os.stat(tmp_path / f"{key.digest}.safetensors").st_mode
    assert mode == os.stat(ordinary).st_mode


def test_threads_do_not_disturb_each_other(tmp_path, documents):
    """Blends of one model in several threads, while another model of its kind generates."""
    model, bystander = (tiny_model(attn_implementation="eager") for _ in range(2))
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    store.add(documents, progress=False)
    segments = [PREFIX, *documents, row(4)]
    ids = random_ids(1, 30)
    expected = full_logits(model, segments), bystander(ids).logits
    failures = []

    @torch.no_grad()
    def work(blending):
        try:
            for _ in range(15):
                if blending:
                    cache = BlendedCache.blend(model, store, segments, recompute_ratio=1)
                    actual, wanted = next_logits(model, cache), expected[0]
                else:
                    actual = bystander(ids, past_key_values=DynamicCache()).logits
                    wanted = expected[1]
                torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i < 2,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_layer_is_enough_for_selectors_that_need_no_check_layer(tmp_path, documents):
    model = tiny_model(num_hidden_layers=1)
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    store.add(documents, progress=False)
    segments = [PREFIX, *documents, row(4)]
    BlendedCache.blend(model, store, segments, selector="query")
    with pytest.raises(ValueError, match="check_layer=1 is not valid: the model has layers 0 to 0"):
        BlendedCache.blend(model, store, segments, selector="hkvd")


@pytest.mark.parametrize(
    "ids", [torch.ones(2, 3, dtype=torch.long), [1.7, 2.0], torch.rand(3), [[1, 2]]]
)
def test_ids_of_a_wrong_form_are_named(tmp_path, ids):
    store = ChunkStore(tmp_path, tiny_model())
    with pytest.raises(ValueError, match=r"documents\[0\] must be text or a flat sequence"):
        store.add([ids], progress=False)


def test_ids_as_tensors(tmp_path):
    store = ChunkStore(tmp_path, tiny_model())
    ids = torch.tensor([4, 5, 6])
    assert store.add([ids, ids.numpy(), ids.tolist()], progress=False) == [store.key([4, 5, 6])] * 3


def test_a_prompt_that_holds_the_padding_token(tmp_path):
    model = tiny_model()
    store = ChunkStore(tmp_path, model)
    documents = [[5, 0, 7, 0, 9], [11, 0, 13]]
    store.add(documents, progress=False)
    blended = BlendedCache.blend(model, store, [*documents, [4, 0, 6]], recompute_ratio=1)
    options = dict(max_new_tokens=5, do_sample=False)
    ids = blended.input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(
        model.generate(**blended.inputs, past_key_values=blended, **options), expected
    )


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("one string", "documents is one string"),
        ([""], r"documents\[0\] is empty"),
        (["not there"], r"documents\[0\] does not appear"),
        (["second", "first"], r"documents\[1\] does not appear"),
    ],
)
def test_segments_from_chat_names_what_is_wrong(small_model, documents, message):
    _, tokenizer = small_model
    messages = [{"role": "user", "content": "first\nsecond\nWhat?"}]
    with pytest.raises(ValueError, match=message):
        segments_from_chat(tokenizer, messages, documents)


def test_segments_from_chat_are_the_rendered_chat(small_model):
    _, tokenizer = small_model
    messages = [{"role": "user", "content": "first\n\nsecond\nWhat?"}]
    segments = segments_from_chat(tokenizer, messages, ["first", "second"])
    assert segments[1:4] == ["first", "\n\n", "second"]
    assert "".join(segments) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_segments_from_chat_are_not_cut_in_the_template(small_model):
    """A document may be a word that the template or another message has, too."""
    _, tokenizer = small_model
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "user\n\nassistant\nWhat?"},
    ]
    segments = segments_from_chat(tokenizer, messages, ["user", "assistant"])
    before, first, between, second, rest = segments
    assert (first, between, second) == ("user", "\n\n", "assistant")
    assert "Be short." in before and before.endswith("user\n") and rest.startswith("\nWhat?")
