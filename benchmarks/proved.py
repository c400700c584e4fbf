"""What happens to common architectures before the first step with `exact`, `coupled` and `GradientCheckpointing`: proved, or refused with a message.

    python benchmarks/proved.py                   # print the tables
    python benchmarks/proved.py --save            # and write them to benchmarks/results/proved.json, which the docs show
    python benchmarks/proved.py --save --only BERT "timm resnet18"   # the other rows of this file stay
    python benchmarks/proved.py --save --only kinds                  # the second table

Each model has a process of its own, since a process keeps most of the memory that it has had. What is found is written after each model. Each model is trained in float32, as users train it, from random weights. Nothing is downloaded. `trained` is the check of the check: one step in float64 with
dropout, batch norm and all, in this way and with the large batch, and the relative difference of the gradients and buffers. With `coupled`, batch norm and dropout
see the slices, as the docs say, so there this number is given only for models that have neither. The second table has the models of tests/kinds.py.
"""
import argparse,contextlib,io,time,warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from common import *
sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'tests'))
from fastai.callback.progress import ProgressCallback
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.vision.all import *
from fastai_accum.all import *

bs,small,px = 8,3,64
ways = dict(exact=lambda: MicroBatch(small, exact=True), coupled=lambda: MicroBatch(small, coupled=True), checkpointing=lambda: GradientCheckpointing())
archs = {}

def arch(family, name, make, data, refused={}, **kwargs):
    "An architecture: `make` returns the model, `data` a batch; `refused` has the ways that are rightly refused, each with a word of the message and the reason, `needs` a package"
    archs[name] = dict(family=family, make=make, data=data, refused=refused, **kwargs)

def gen(): return torch.Generator().manual_seed(0)
def classes(*size, c=3): return torch.randint(c, size, generator=gen())
def images(bs=bs, px=px): return torch.randn(bs, 3, px, px, generator=gen()),classes(bs)
def masks(): return images(4)[0],classes(4, px, px)
def tokens(n=16): return torch.randint(5, 50, (bs,n), generator=gen()),classes(bs)
def next_tokens(n=16): return torch.randint(5, 50, (bs,n), generator=gen()),classes(bs, n, c=50)

class Takes(nn.Module):
    "A model of transformers of which users take the logits, or a part of them"
    def __init__(self, m, f=lambda m, x: m(x).logits):
        super().__init__()
        self.m,self.f = m,f
    def forward(self, x): return self.f(self.m, x)

# ---- fastai

def body(a, **kwargs): return lambda: create_vision_model(a, 3, pretrained=False, **kwargs)
def unet(a, **kwargs): return lambda: create_unet_model(a, 3, (px,px), pretrained=False, **kwargs)
def learner_of(a, **kwargs):
    def make():
        b = images()
        dls = DataLoaders(DataLoader([b], bs=None), DataLoader([b], bs=None))
        return vision_learner(dls, a, n_out=3, pretrained=False, normalize=False, loss_func=nn.CrossEntropyLoss(), **kwargs).model
    return make

for a in resnet18,resnet34,resnet50: arch('fastai', a.__name__, body(a), images)
for a in xresnet18,xresnet50,xresnet18_deep,xse_resnet18,xresnext18: arch('fastai', a.__name__, lambda a=a: a(n_out=3), images)
arch('fastai', 'vision_learner(resnet18)',                     learner_of(resnet18), images)
arch('fastai', 'vision_learner(resnet18, concat_pool=False)',  learner_of(resnet18, concat_pool=False), images)
arch('fastai', 'vision_learner(resnet18, lin_ftrs, bn_final)', learner_of(resnet18, lin_ftrs=[64,32], bn_final=True, ps=.3), images)
arch('fastai', 'vision_learner(densenet121)',                  learner_of(densenet121), images)
arch('fastai', "vision_learner('convnext_atto')",              learner_of('convnext_atto'), images, needs='timm')
arch('fastai', 'unet_learner(resnet18)',                       unet(resnet18), masks)
arch('fastai', 'unet_learner(resnet18, self_attention)',       unet(resnet18, self_attention=True), masks)
arch('fastai', 'unet_learner(resnet34, blur, Mish)',           unet(resnet34, blur=True, act_cls=Mish), masks)
def rows(): return (classes(bs, 3, c=5),torch.randn(bs, 4, generator=gen())),classes(bs)
arch('fastai', 'tabular_learner',              lambda: TabularModel([(5,3)]*3, 4, 3, [40,20], ps=[.1,.1], embed_p=.1), rows)
arch('fastai', 'tabular_learner, bn_final',    lambda: TabularModel([(5,3)]*3, 4, 3, [40,20], use_bn=True, bn_final=True, bn_cont=True), rows)
awd = dict(emb_sz=20, n_hid=24, n_layers=2)
arch('fastai', 'AWD-LSTM language model', lambda: get_language_model(AWD_LSTM, 50, config={**awd_lstm_lm_config, **awd}), next_tokens,
     cbs=rnn_cbs, loss=CrossEntropyLossFlat())
arch('fastai', 'AWD-LSTM classifier',     lambda: get_text_classifier(AWD_LSTM, 50, 3, seq_len=10, config={**awd_lstm_clas_config, **awd}), partial(tokens, 25),
     cbs=rnn_cbs, loss=CrossEntropyLossFlat())

# ---- timm

drops = dict(drop_rate=.1, drop_path_rate=.1)
def of_timm(name, **kwargs):
    import timm
    return timm.create_model(name, pretrained=False, num_classes=3, **kwargs)
for name,kw in dict(resnet18={}, resnet50d=drops, resnext26ts={}, resnetv2_50=drops, densenet121={}, efficientnet_b0=drops, tf_efficientnetv2_b0=drops,
    mobilenetv3_small_100=drops, regnety_002=drops, repvgg_a0={}, ghostnet_100={}, hrnet_w18_small={}, convnext_atto=drops, convnextv2_atto=drops, edgenext_xx_small=drops,
    mobilevit_xxs=drops, poolformer_s12=drops, vit_tiny_patch16_224=dict(img_size=px, **drops), swin_tiny_patch4_window7_224=dict(img_size=px, window_size=4, **drops),
    mixer_s32_224=dict(img_size=px, **drops), deit_tiny_distilled_patch16_224=dict(img_size=px), xcit_nano_12_p16_224=dict(img_size=px, **drops)).items():
    arch('timm', f'timm {name}', partial(of_timm, name, **kw), images, needs='timm')

# ---- transformers

def of_tf(kind, config, f=None, **kwargs):
    import transformers as tf
    m = getattr(tf, kind)(getattr(tf, config)(**kwargs))
    return Takes(m, f) if f else Takes(m)
ids  = dict(vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=2)
tiny = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
def hf(name, kind, config, data=tokens, f=None, loss=None, refused={}, in64=True, family='transformers', **kwargs):
    arch(family, name, lambda: of_tf(kind, config, f, **kwargs), data, refused, loss=loss, in64=in64, needs='transformers')
def both(*why): return dict(exact=why, coupled=why)
def sounds(): return torch.randn(bs, 1600, generator=gen()),classes(bs)
flat = CrossEntropyLossFlat()
hf('BERT',       'BertForSequenceClassification', 'BertConfig', num_labels=3, **ids, **tiny)
hf('DistilBERT', 'DistilBertForSequenceClassification', 'DistilBertConfig', num_labels=3, dim=16, n_layers=2, n_heads=2, hidden_dim=32, **ids)
hf('ViT',        'ViTForImageClassification', 'ViTConfig', images, num_labels=3, image_size=px, hidden_dropout_prob=.1, **tiny)
hf('ResNet',     'ResNetForImageClassification', 'ResNetConfig', images, num_labels=3, embedding_size=8, hidden_sizes=[8,16], depths=[1,1], layer_type='basic')
gpt = dict(n_layer=2, n_embd=16, n_head=2, **ids)
hf('GPT-2',      'GPT2LMHeadModel', 'GPT2Config', next_tokens, loss=flat, use_cache=False, **gpt)
hf('GPT-2, use_cache=True, the whole output', 'GPT2LMHeadModel', 'GPT2Config', next_tokens, f=lambda m, x: m(x), loss=lambda p, y: flat(p['logits'], y),
   refused=both('use_cache', 'its cache is an object, which cannot be joined'), **gpt)
llama = dict(num_key_value_heads=1, **tiny, **ids)
hf('Llama',      'LlamaForCausalLM', 'LlamaConfig', next_tokens, loss=flat, use_cache=False, **llama)
hf('Llama, use_cache=True', 'LlamaForCausalLM', 'LlamaConfig', next_tokens, loss=flat, **llama)
hf('T5',         'T5ForConditionalGeneration', 'T5Config', next_tokens, f=lambda m, x: m(input_ids=x, decoder_input_ids=x, use_cache=False).logits, loss=flat,
   vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
moe = dict(use_cache=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, **llama)
hf("Qwen3-MoE, experts_implementation='eager'", 'Qwen3MoeForCausalLM', 'Qwen3MoeConfig', next_tokens, loss=flat, experts_implementation='eager', **moe)
# its product of all experts at once has no float64 kernel
hf('Qwen3-MoE',  'Qwen3MoeForCausalLM', 'Qwen3MoeConfig', next_tokens, loss=flat, in64=False, **moe)
hf('Mamba',      'MambaForCausalLM', 'MambaConfig', next_tokens, loss=flat, use_cache=False, hidden_size=16, num_hidden_layers=2, state_size=4, **ids)
wav = dict(num_labels=3, conv_dim=(8,8,8), conv_kernel=(10,3,3), conv_stride=(5,2,2), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
           classifier_proj_size=8, **tiny)
hf('Wav2Vec2, layerdrop=0, no masks', 'Wav2Vec2ForSequenceClassification', 'Wav2Vec2Config', sounds, layerdrop=0., apply_spec_augment=False, **wav)
hf('Wav2Vec2',   'Wav2Vec2ForSequenceClassification', 'Wav2Vec2Config', sounds, mask_time_length=2,
   refused=both('MicroBatch', 'it masks parts of the sounds, and skips layers, by random numbers for the whole batch'), **wav)

# ---- of the size that users train: how long the proof takes

for a in resnet18,resnet50: arch('full size', f'{a.__name__}, 224 pixels', body(a), partial(images, px=224))
hf('BERT, 110 million parameters, 128 tokens', 'BertForSequenceClassification', 'BertConfig', partial(tokens, 128), num_labels=3, family='full size')

# ---- what happens

said = re.compile(r'(\d+) samples, ([\d.]+) s, largest error (\S+?)\.? ')   # the line that is printed when a model is proved

class Stop(Callback):
    "Stop when the first batch has gone through the model: everything that is proved is proved by then"
    def after_pred(self):
        if self.training: raise CancelFitException

def learner(name, way=None, dtype=None, also=()):
    a = archs[name]
    set_seed(0)
    model,b = a['make'](),a['data']()
    b = *tuplify(b[0]),b[1]
    if dtype: model,b = model.to(dtype),tuple(o.to(dtype) if o.is_floating_point() else o for o in b)
    dl = lambda: DataLoader([b], bs=None)
    dls = DataLoaders(dl(), dl())
    dls.n_inp = len(b)-1
    cbs = [NoValid(), *also, *L((a.get('cbs') or list)()), *L(way and ways[way]())]
    learn = Learner(dls, model, loss_func=a.get('loss') or nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=.9), lr=.01, cbs=cbs)
    learn.remove_cbs([ProgressCallback, *[Recorder]*(dtype is not None)])   # the recorder is float32
    learn.logger = noop
    set_seed(1)
    return learn

def proof_of(learn):
    "What comes of the first batch of a fit: `proved`, `not tried` or `refused`, in what time, and what it said"
    learn.add_cb(Stop())
    out,t = io.StringIO(),time.perf_counter()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        try: learn.fit(1); what,says = 'proved',out.getvalue()
        except Exception as e:
            is_refusal = isinstance(e, ValueError) and str(e).startswith(('MicroBatch','GradientCheckpointing'))
            what,says = ('refused',str(e)) if is_refusal else ('error',f'{type(e).__name__}: {e}')
    ours = [str(w.message) for w in ws if 'was not tried' in str(w.message)]
    if what=='proved' and ours: what,says = 'not tried',ours[0]
    lines = says.strip().split('\n')
    return dict(what=what, says=next((l for l in lines if said.search(l+' ')), lines[0]), seconds=time.perf_counter()-t)

class Steps(Callback):
    "Keeps the gradients of the step, and notes whether anything was drawn"
    order = 1000
    def before_batch(self): self.start = torch.get_rng_state()
    def before_step(self):
        self.got = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.drew = not torch.equal(self.start, torch.get_rng_state())

def trained(name, way):
    "The relative difference of the gradients and buffers of one step in float64, in this `way` and with the large batch"
    res = []
    for w in None,way:
        learn = learner(name, w, torch.float64, [Steps()])
        with contextlib.redirect_stdout(io.StringIO()): learn.fit(1)
        has_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in learn.model.modules())
        if way=='coupled' and (has_norm or learn.steps.drew): return None   # they see the slices
        res.append((learn.steps.got, [b.double() for b in learn.model.buffers()]))
        del learn
        gc.collect()
    (g,b),(G,B) = res[1],res[0]
    assert len(g)==len(G) and len(b)==len(B), f'{name}, {way}: other parameters have a gradient'
    def off(xs, ys):   # together, since some gradients are zero but for rounding: a bias before a batch norm
        n = sum(y.square().sum() for y in ys)
        return (sum((x-y).square().sum() for x,y in zip(xs, ys))/n).sqrt().item() if n else 0.
    return max(off(g, G), off(b, B))

def row(name, way):
    "What happened to one architecture in one way"
    learn = learner(name, way)
    params = sum(map(torch.numel, learn.model.parameters()))
    found = proof_of(learn)
    r = dict(family=archs[name]['family'], name=name, params=params, way=way, why=archs[name]['refused'].get(way, ('',''))[1], **found)
    m = said.search(r['says']+' ')
    if r['what']=='proved' and m: r.update(n=int(m[1]), seconds=float(m[2]), error=float(m[3]))
    if r['what']=='proved': r['trained'] = trained(name, way) if archs[name].get('in64', True) else None
    return r

def cells(r):
    "What happened, for the table that is printed"
    if r['what']!='proved': return r['name'],r['way'],r['what'],'','','',r['says']
    err,diff = r.get('error'),r['trained']
    return (r['name'], r['way'], 'proved', '' if err is None else f'{err:.0e}', r.get('n', ''), f"{r['seconds']:.1f}", '' if diff is None else f'{diff:.0e}')

outcomes = 'exact','refused','stopped','not seen','silent','moved','raw'
def of_kinds():
    "What happens to the models of tests/kinds.py"
    import kinds
    res = []
    for name,k in {**kinds.kinds, **kinds.controls}.items():
        for way in k.ways:
            with contextlib.redirect_stdout(io.StringIO()): what,says = kinds.verdict(k, way)
            says = says if isinstance(says, str) else f'{says[0]:.0e}'
            if way in k.limit: what = {'silent':'not seen', 'moved':'not seen'}.get(what, what)
            res.append(dict(row=k.row, name=name, control=name in kinds.controls, way=way, what=what, says=says.split('\n')[0]))
    return res

def rows_of(name): return [row(name, way) for way in ways]

def alone(f, *args):
    "What `f` returns in a process of its own"
    with ProcessPoolExecutor(1, mp_context=get_context('fork')) as pool: return pool.submit(f, *args).result()

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--save', action='store_true'); p.add_argument('--only', nargs='*')
    args = p.parse_args()
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    print(machine())
    was = json.loads((Path(__file__).parent/'results'/'proved.json').read_text(encoding='utf-8'))
    rows,cases = {n:[r for r in was['rows'] if r['name']==n] for n in archs},was['cases']
    def keep():
        if args.save: save('proved', batch=bs, slice=small, rows=sum(rows.values(), []), cases=cases)
    for name in [o for o in args.only or archs if o!='kinds']:
        rows[name] = alone(rows_of, name)
        for r in rows[name]: print(' | '.join(map(str, cells(r))), flush=True)
        keep()
    if not args.only or 'kinds' in args.only:
        cases = alone(of_kinds)
        keep()
        print(table([(r, w, *(sum(c['what']==o for c in cases if (c['row'],c['way'])==(r,w)) for o in outcomes))
                     for r in dict.fromkeys(c['row'] for c in cases) for w in ways], ['model','way',*outcomes]))
