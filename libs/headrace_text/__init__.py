"""Text to tokens and back, for each served model. No router code and no engine library.

- codec: the interface of a model's tokenizer and chat template
- hugging_face: the codec of a model folder in Hugging Face's format
- byte_codec: the codec of the simulated model
- tokenizing: bounded calls of the libraries tokenizers and kitoken
- chat_encoder: conversations to tokens
- control_tokens: protection against control tokens in clients' texts, which literal_finder finds
- piece_cache: tokens of known texts, by tenant
- chat_template: Jinja chat templates, rendered in a sandbox
- load: the codecs of all served models
- detokenizer: tokens to text while they are generated
- stop_strings: stop strings in generated text
"""
