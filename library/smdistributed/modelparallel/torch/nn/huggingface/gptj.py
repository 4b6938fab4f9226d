"""State dicts of GPT-J: see `translation`."""

from smdistributed.modelparallel.torch.nn.huggingface.translation import same_names

translate_hf_gptj_state_dict_to_smdistributed = same_names("translate_hf_gptj_state_dict_to_smdistributed")
translate_hf_gptj_state_dict_to_smdistributed_gptj = same_names("translate_hf_gptj_state_dict_to_smdistributed_gptj")
translate_hf_state_dict_to_smdistributed_gptj = same_names("translate_hf_state_dict_to_smdistributed_gptj")
translate_state_dict_to_hf_gptj = same_names("translate_state_dict_to_hf_gptj")
