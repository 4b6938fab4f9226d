"""State dicts of BERT: see `translation`."""

from smdistributed.modelparallel.torch.nn.huggingface.translation import same_names

translate_hf_state_dict_to_smdistributed = same_names("translate_hf_state_dict_to_smdistributed")
translate_hf_state_dict_to_smdistributed_bert = same_names("translate_hf_state_dict_to_smdistributed_bert")
translate_state_dict_to_hf_bert = same_names("translate_state_dict_to_hf_bert")
