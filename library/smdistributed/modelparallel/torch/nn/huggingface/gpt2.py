"""State dicts of GPT-2: see `translation`."""

from smdistributed.modelparallel.torch.nn.huggingface.translation import same_names

translate_hf_state_dict_to_smdistributed = same_names("translate_hf_state_dict_to_smdistributed")
translate_hf_state_dict_to_smdistributed_gpt2 = same_names("translate_hf_state_dict_to_smdistributed_gpt2")
translate_state_dict_to_hf_gpt2 = same_names("translate_state_dict_to_hf_gpt2")
