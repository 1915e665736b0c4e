"""What other libraries call what is here, and what to write instead: answers to names that vitlite does not have."""

FIELDS = {  # of a ViTConfig, given to one or read from one
    # timm
    "img_size": "It is image_size.",
    "in_chans": "It is channels.",
    "embed_dim": "It is dim.",
    "num_heads": "It is heads.",
    "mlp_ratio": "It is mlp_dim, which is dim times that.",
    "global_pool": "It is pool.",
    "init_values": "It is layer_scale.",
    "reg_tokens": "It is registers.",
    "no_embed_class": "It is cls_position=False.",
    "drop_rate": "The nearest is dropout.",
    "attn_drop_rate": "The nearest is dropout.",
    "proj_drop_rate": "The nearest is dropout.",
    "pos_drop_rate": "The nearest is dropout.",
    "drop_path_rate": "It is drop_path.",
    "act_layer": "It is gelu, of 'exact', 'tanh' and 'quick'.",
    "norm_layer": "All are LayerNorm, of norm_eps.",
    # transformers
    "hidden_size": "It is dim.",
    "num_hidden_layers": "It is depth.",
    "num_attention_heads": "It is heads.",
    "intermediate_size": "It is mlp_dim.",
    "num_labels": "It is num_classes.",
    "num_channels": "It is channels.",
    "layer_norm_eps": "It is norm_eps.",
    "hidden_act": "It is gelu, of 'exact', 'tanh' and 'quick'.",
    "hidden_dropout_prob": "The nearest is dropout.",
    "attention_probs_dropout_prob": "The nearest is dropout.",
    "layerscale_value": "It is layer_scale.",
    "num_register_tokens": "It is registers.",
    "id2label": "Labels are no part of a config, but of the model: model.labels.",
    "label2id": "Labels are no part of a config, but of the model: model.labels.",
    # torchvision, vit-pytorch
    "num_layers": "It is depth.",
    "hidden_dim": "It is dim.",
    "dim_head": "It is head_dim.",
    "emb_dropout": "The nearest is dropout.",
}
VALUES = {  # of such a field
    "pool": {"avg": "mean", "gap": "mean", "token": "cls", "tok": "cls"},
    "gelu": {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "quick_gelu": "quick"},
}
CREATE = {  # options of `create` and `load`
    "pretrained": "Trained weights are what create gives; for random ones: weights=None.",
    "checkpoint_path": "Write weights=.",
    "img_size": "Write image_size=.",
    "in_chans": "Write channels=.",
    "global_pool": "Write pool=.",
    "num_labels": "Write num_classes=.",
    "drop_path_rate": "Write drop_path=.",
    "drop_rate": "Write vitlite.load(path, config=ViTConfig(dropout=...)).",
    "attn_drop_rate": "Write vitlite.load(path, config=ViTConfig(dropout=...)).",
    "proj_drop_rate": "Write vitlite.load(path, config=ViTConfig(dropout=...)).",
    "ignore_mismatched_sizes": "Write num_classes=, for a new head; nothing else may differ.",
    "features_only": "Write model.features(images, layers=(2, 5)), of any model.",
    "out_indices": "Write model.features(images, layers=(2, 5)), of any model.",
    "dynamic_img_size": "Any image size goes, at every call, without an option.",
    "pretrained_cfg": "Set model.preprocess and model.labels, or write weights=.",
    "pretrained_cfg_overlay": "Set model.preprocess and model.labels, or write weights=.",
    "revision": "Write vitlite.load('owner/name@revision').",
    "cache_dir": "Set the variable VITLITE_CACHE, or HF_HOME.",
    "token": "Set the variable HF_TOKEN.",
    "local_files_only": "Set the variable HF_HUB_OFFLINE=1.",
    "device_map": "Write device=.",
    "torch_dtype": "Write dtype=.",
    "trust_remote_code": "vitlite runs no code of a repository.",
    "id2label": "Set model.labels.",
    "add_pooling_layer": "There is no pooler; what the head sees is model.embed(images).",
    "attn_implementation": "There is nothing to choose; for the maps write model.attention_maps(images).",
}
LIBRARY = {  # of the package: vitlite.create_model
    "create_model": "Write vitlite.create(name).",
    "from_pretrained": "Write vitlite.load('owner/name'), or vitlite.create(name).",
    "AutoModel": "Write vitlite.load('owner/name').",
    "AutoModelForImageClassification": "Write vitlite.load('owner/name').",
    "ViTModel": "Write vitlite.load('owner/name').",
    "ViTForImageClassification": "Write vitlite.load('owner/name').",
    "load_model": "Write vitlite.load(path), or vitlite.create(name).",
    "is_model": "Write name in vitlite.list_models().",
    "model_info": "Write vitlite.info(name).",
    "Recorder": "Write model.attention_maps(images, layers=(0, 1, 2)): (layers, b, heads, n, n).",
    "list_pretrained": "Write vitlite.list_models().",
    "AutoImageProcessor": "A model has its own: model.preprocess(picture).",
    "ViTImageProcessor": "A model has its own: model.preprocess(picture).",
    "pipeline": "Write model.predict(pictures).",
    "create_transform": "A model has its own: model.preprocess(picture).",
}
CALL = {  # options of calling a model
    # transformers
    "pixel_values": "Write model(images), and model(model.preprocess(pictures)) for pictures.",
    "output_attentions": "Write model.attention_maps(images, layers=range(model.config.depth)).",
    "output_hidden_states": "Write model.features(images, layers=range(model.config.depth)).layers.",
    "interpolate_pos_encoding": "Any image size goes, at every call, without an option.",
    "return_dict": "The answer is a tensor of logits; tokens are those of model.features(images).",
    "labels": "Write torch.nn.functional.cross_entropy(model(images), labels).",
    "bool_masked_pos": "No patch is masked here.",
    # DINOv2
    "is_training": "Write model.features(images): .cls, .patches and .registers.",
    "masks": "No patch is masked here.",
    # vit-pytorch, timm
    "mask": "No patch is masked here.",
    "attn_mask": "No patch is masked here.",
}
NOT_TIMMS_DEFAULTS = (
    "Pictures are prepared by model.preprocess(picture). timm's resolve_model_data_config would go on with defaults, "
    "which are not this model's; for its create_transform take model.preprocess.transform's mean and std."
)
MODEL = {  # methods and attributes of a model
    # timm
    "forward_features": "Write model.features(images): .cls, .patches and .registers, after the final norm.",
    "forward_head": "Write model.embed(images) for what the head sees, model.head(vectors) for the head itself.",
    "forward_intermediates": "Write model.features(images, layers=(2, 5)): .layers.",
    "get_intermediate_layers": "Write model.features(images, layers=(-4, -3, -2, -1), norm=True).layers, each with its "
    "class token and registers before the patches. n=4 means the last four blocks, layers=4 is block 4.",
    "reset_classifier": "Write model.reset_head(num_classes).",
    "get_classifier": "Write model.head.",
    "set_grad_checkpointing": "Create it so: vitlite.create(name, checkpointing=True), or vitlite.load.",
    "feature_info": "The outputs of all blocks are alike: model.config.dim wide, a token for each of "
    "model.config.patch_size pixels squared. Which ones: model.features(images, layers=(2, 5)).",
    "group_matcher": "How deep a weight lies: vitlite.training.optim.depth_of(name, model.config.depth).",
    "no_weight_decay": "They are 'pos_embed', 'cls_token' and 'reg_token', and whatever has one axis.",
    "head_hidden_size": "Write model.config.embed_dim.",
    "global_pool": "Write model.config.pool.",
    "num_features": "Write model.config.embed_dim.",
    "embed_dim": "Write model.config.embed_dim, or model.config.dim for a token's width.",
    "num_classes": "Write model.config.num_classes.",
    "num_prefix_tokens": "Write model.config.prefix_tokens.",
    "pretrained_cfg": f"Write model.config, model.preprocess.transform and model.source. {NOT_TIMMS_DEFAULTS}",
    "default_cfg": f"Write model.config, model.preprocess.transform and model.source. {NOT_TIMMS_DEFAULTS}",
    "set_input_size": "Any image size goes, at every call. To keep the table so: create(..., image_size=384).",
    # transformers
    "from_pretrained": "Write vitlite.load('owner/name').",
    "save_pretrained": "Write model.save(folder); for transformers: vitlite.checkpoints.convert.convert(folder, "
    "target, 'transformers').",
    "push_to_hub": "Write vitlite.checkpoints.save.push_to_hub(model, 'owner/name').",
    "gradient_checkpointing_enable": "Write create(..., checkpointing=True), or load(...).",
    "num_parameters": "Write sum(tensor.numel() for tensor in model.parameters()).",
    "classifier": "Write model.head.",
    "id2label": "Write model.labels.",
    "num_labels": "Write model.config.num_classes.",
    "layernorm": "Write model.norm.",
    "pooler": "There is none; what the head sees is model.embed(images).",
    "embeddings": "Write model.patch_embed, model.cls_token and model.pos_embed.",
    "vit": "It is the model itself: model.embed(images), model.features(images), model.blocks.",
    "encoder": "Write model.blocks.",
    "interpolate_pos_encoding": "Any image size goes, at every call, without an option.",
    # torchvision, vit-pytorch
    "heads": "Write model.head; the number of heads is model.config.heads.",
    "conv_proj": "Write model.patch_embed.proj.",
    "mlp_head": "Write model.head.",
    "to_patch_embedding": "Write model.patch_embed.",
    "pos_embedding": "Write model.pos_embed.",
    "transformer": "Write model.blocks.",
    "transform": "Write model.preprocess(picture).",
    "transforms": "Write model.preprocess(picture).",
    # DINO
    "get_last_selfattention": "Write model.attention_maps(images)[-1].",
    "prepare_tokens": "Write model.features(images, layers=(0,)) for the first block's output.",
    # open_clip
    "encode_image": "Write model(images): the projection of CLIP is the head.",
}
ASKED_FOR = ("pretrained_cfg", "default_cfg")  # by timm with hasattr, which goes on with others where there are none
