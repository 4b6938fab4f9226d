"""State dicts of GPT-Neo: see `translation`."""

from smdistributed.modelparallel.torch.nn.huggingface.translation import same_names

translate_hf_state_dict_to_smdistributed_gptneo = same_names("translate_hf_state_dict_to_smdistributed_gptneo")
translate_state_dict_to_hf_gptneo = same_names("translate_state_dict_to_hf_gptneo")
