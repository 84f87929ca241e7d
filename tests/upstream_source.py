"""Stand-ins for the source files of TensorRT-LLM that the patch reads: our own text, in the documented shape.

The shape changes twice: from 0.15 the ungathered states are bound to ``all_hidden_states`` and returned third; from
0.16 the tokens are split among context-parallel ranks and the states gathered again.
"""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

VERSIONS = ("0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0.dev2024121700", "0.17.0", "0.21.0", "1.0.0", "1.2.1")


def write_upstream(folder: Path, version: str) -> Path:
    """Write a package of ``version`` into ``folder``, a site-packages; return it. Importing it is an error."""
    package = folder / "tensorrt_llm"
    deci = package / "models" / ("deci" if Version(version) < Version("0.15") else "nemotron_nas")
    deci.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a build-time tool may not import this package')\n")
    (package / "version.py").write_text(f'"""Version."""\n__version__ = "{version}"\n')
    definition_path(folder).write_text(decoder_source(version))
    (deci / "model.py").write_text(decilm_source())
    return folder


def definition_path(folder: Path) -> Path:
    return folder / "tensorrt_llm" / "models" / "modeling_utils.py"


def decilm_path(folder: Path) -> Path:
    return next((folder / "tensorrt_llm" / "models").glob("*/model.py"))


def decoder_source(version: str) -> str:
    """The decoder's file: the class, a subclass, and a class with a gather of its own that is none of our business."""
    has_all, has_cp = Version(version) >= Version("0.15.dev0"), Version(version) >= Version("0.16.dev0")
    tail = _tail("lm_logits, hidden_states, all_hidden_states" if has_all else "lm_logits, hidden_states", has_all)
    return f'''"""A decoder's definition: hidden_states = gather_last_token_logits(...) is its anchor."""

from ..functional import {"cp_gather, cp_split, " if has_cp else ""}gather_last_token_logits, remove_input_padding


class PretrainedModel:

    def dtype(self):
        return self.config.dtype


class DecoderModelForCausalLM(PretrainedModel):

    def __init__(self, config, transformer, lm_head):
        self.config, self.transformer, self.lm_head = config, transformer, lm_head

    def forward(self, input_ids, position_ids=None, use_cache=False, last_token_ids=None, **more):
{_CP_SPLIT if has_cp else ""}        arguments = {{"input_ids": input_ids, "position_ids": position_ids, "use_cache": use_cache, **more}}
        hidden_states = self.transformer.forward(**arguments)
        if use_cache:
            hidden_states, presents = hidden_states
{_CP_GATHER if has_cp else ""}{tail}

class EagleForCausalLM(DecoderModelForCausalLM):

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class EncoderModel(PretrainedModel):

    def forward(self, hidden_states, last_token_ids):
        hidden_states = gather_last_token_logits(hidden_states, last_token_ids, remove_input_padding())
        hidden_states.mark_output('encoder_output', self.config.dtype)
'''


def decilm_source() -> str:
    """A class with a full copy of the decoder's tail, which returns a pair in every version."""
    return f"""from ..functional import gather_last_token_logits, remove_input_padding


class DeciLMForCausalLM:

    def forward(self, input_ids, position_ids=None, use_cache=False, last_token_ids=None):
        hidden_states = self.transformer.forward(input_ids=input_ids, use_cache=use_cache)
        if use_cache:
            hidden_states, presents = hidden_states
{_tail("lm_logits, hidden_states", has_all=False)}"""


_CP_SPLIT = """        whole_ids = input_ids
        if self.config.mapping.cp_size > 1:
            input_ids = cp_split(input_ids, self.config.mapping)
"""
_CP_GATHER = """        if self.config.mapping.cp_size > 1:
            hidden_states = cp_gather(hidden_states, whole_ids, self.config.mapping)
"""


def _tail(returned: str, has_all: bool) -> str:
    cached = returned.replace("lm_logits, ", "lm_logits, presents, ", 1).removesuffix(", all_hidden_states")
    return f"""
        if self.config.mapping.is_last_pp_rank():
{"            all_hidden_states = hidden_states" if has_all else "            # to logits"}
            hidden_states = gather_last_token_logits(
                hidden_states, last_token_ids,
                remove_input_padding())  # one row of each sequence

            lm_logits = self.lm_head(hidden_states)
            lm_logits.mark_output('logits', self.config.logits_dtype)
        else:
            hidden_states.mark_output('hidden_states_output', self.config.dtype)

        if use_cache:
            for i, present in enumerate(presents):
                present.mark_output(f'present_key_value_{{i}}', self.config.dtype)
            if self.config.mapping.is_last_pp_rank():
                return ({cached})
            return (hidden_states, presents)
        if self.config.mapping.is_last_pp_rank():
            return {returned}
        return hidden_states
"""
