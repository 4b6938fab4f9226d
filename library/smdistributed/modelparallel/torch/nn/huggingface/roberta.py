"""State dicts of RoBERTa: see `translation`."""

from smdistributed.modelparallel.torch.nn.huggingface.translation import same_names

translate_hf_state_dict_to_smdistributed = same_names("translate_hf_state_dict_to_smdistributed")
translate_hf_state_dict_to_smdistributed_roberta = same_names("translate_hf_state_dict_to_smdistributed_roberta")
translate_state_dict_to_hf_roberta = same_names("translate_state_dict_to_hf_roberta")
translate_state_dict_to_smdistributed = same_names("translate_state_dict_to_smdistributed")
