"""What other libraries call what is here, and what to write instead: answers to names that vitlite does not have."""

CREATE = {  # options of `create` and `load`
    "pretrained": "Trained weights are what create gives; for random ones: weights=None.",
    "checkpoint_path": "Write weights=.",
    "img_size": "Write image_size=.",
    "in_chans": "Write channels=.",
    "global_pool": "Write pool=.",
    "num_labels": "Write num_classes=.",
    "drop_path_rate": "Write drop_path=.",
    "drop_rate": "Write vitlite.load(path, config=ViTConfig(dropout=...)).",
    "dropout": "Write vitlite.load(path, config=ViTConfig(dropout=...)).",
    "heads": "Where a file does not tell it, write vitlite.load(path, config=ViTConfig(heads=...)).",
    "ignore_mismatched_sizes": "Write num_classes=, for a new head; nothing else may differ.",
    "features_only": "Write model.features(images, layers=(2, 5)), of any model.",
    "out_indices": "Write model.features(images, layers=(2, 5)), of any model.",
    "dynamic_img_size": "Any image size goes, at every call, without an option.",
    "revision": "Write vitlite.load('owner/name@revision').",
}
LIBRARY = {  # of the package: vitlite.create_model
    "create_model": "Write vitlite.create(name).",
    "from_pretrained": "Write vitlite.load('owner/name'), or vitlite.create(name).",
    "AutoModel": "Write vitlite.load('owner/name').",
    "ViTForImageClassification": "Write vitlite.load('owner/name').",
    "load_model": "Write vitlite.load(path), or vitlite.create(name).",
    "is_model": "Write name in vitlite.list_models().",
    "model_info": "Write vitlite.info(name).",
    "Recorder": "Write model.attention_maps(images, layers=(0, 1, 2)): (layers, b, heads, n, n).",
    "list_pretrained": "Write vitlite.list_models().",
    "create_transform": "A model has its own: model.preprocess(picture).",
}
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
    "no_weight_decay": "They are 'pos_embed', 'cls_token' and 'reg_token', and whatever has one axis.",
    "num_features": "Write model.config.embed_dim.",
    "embed_dim": "Write model.config.embed_dim, or model.config.dim for a token's width.",
    "num_classes": "Write model.config.num_classes.",
    "num_prefix_tokens": "Write model.config.prefix_tokens.",
    "pretrained_cfg": "Write model.config, model.preprocess.recipe and model.source.",
    "default_cfg": "Write model.config, model.preprocess.recipe and model.source.",
    "set_input_size": "Any image size goes, at every call. To keep the table so: create(..., image_size=384).",
    # transformers
    "from_pretrained": "Write vitlite.load('owner/name').",
    "save_pretrained": "Write model.save(folder); for transformers: vitlite.convert.convert(folder, target, "
    "'transformers').",
    "push_to_hub": "Write vitlite.weights.save.push_to_hub(model, 'owner/name').",
    "gradient_checkpointing_enable": "Write create(..., checkpointing=True), or load(...).",
    "num_parameters": "Write sum(tensor.numel() for tensor in model.parameters()).",
    "classifier": "Write model.head.",
    "id2label": "Write model.labels.",
    "vit": "It is the model itself: model.embed(images), model.features(images), model.blocks.",
    "encoder": "Write model.blocks.",
    "interpolate_pos_encoding": "Any image size goes, at every call, without an option.",
    # torchvision, vit-pytorch
    "heads": "Write model.head; the number of heads is model.config.heads.",
    "conv_proj": "Write model.patch_embed.proj.",
    "mlp_head": "Write model.head.",
    "transformer": "Write model.blocks.",
    "transform": "Write model.preprocess(picture).",
    "transforms": "Write model.preprocess(picture).",
    # DINO
    "get_last_selfattention": "Write model.attention_maps(images)[-1].",
    "prepare_tokens": "Write model.features(images, layers=(0,)) for the first block's output.",
    # open_clip
    "encode_image": "Write model(images): the projection of CLIP is the head.",
}
