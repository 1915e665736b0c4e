"""What other libraries call what is here, and what to write instead: answers to names that vitlite does not have."""

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
