import sys, torch, json, time, copy
sys.path.insert(0,'examples')
from transformers import AutoModelForCausalLM
from tokenizers import Tokenizer
from tiny_pair.settings import *
from tiny_pair.data import load_corpus
from tiny_pair.text import token_stream, word_starts
from tiny_pair.unloop import *
from tiny_pair.target import *
torch.manual_seed(0)
d='dflash_cli/tiny'; dev='cuda' if torch.cuda.is_available() else 'cpu'
c=load_corpus(Settings() if dev=='cuda' else replace(Settings(),max_source_bytes=500000))
tok=Tokenizer.from_file(d+'/target/tokenizer.json')
s,_=token_stream(tok,c.train); h,_=token_stream(tok,c.held_out); s=s.to(dev);h=h.to(dev)
ws=word_starts(tok).to(dev)
V=[tok.id_to_token(i) for i in range(tok.get_vocab_size())]
broad=torch.tensor([not (t[0].isalnum() and t[0] not in '\u0120\u010a\u0109') and t[0] not in '\u010a\u0109' and t.strip('\u0120')!='' for t in V],device=dev)
print(ws.sum().item(), broad.sum().item(), [t for t,b in zip(V,broad.tolist()) if b][:40])
m0=AutoModelForCausalLM.from_pretrained(d+'/target',dtype=torch.float32).to(dev)
hw=fixed_windows(h,1025,64)
T=['def fibonacci(n):','class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):','import os\nimport sys\n\ndef main():','def read_json(path):','class TestConfig(unittest.TestCase):','    # convert the list to']
def samples(m):
    for t in T:
        i=torch.tensor([tok.encode(t).ids],device=dev)
        print('-----',repr(t)); print(tok.decode(generate(m,i,torch.tensor([i.shape[1]],device=dev),110,0.0)[0].tolist()))
print('base',held_out_loss(m0,hw,16)); samples(m0)
cfgs=[dict(steps=200,gram=16,weight=.5,learning_rate=3e-4),dict(steps=200,gram=16,weight=2.0,learning_rate=3e-4),dict(steps=200,gram=16,weight=.5,learning_rate=3e-4,broad=True),dict(steps=200,gram=16,weight=2.0,learning_rate=3e-4,broad=True),dict(steps=200,gram=16,weight=1.0,learning_rate=1e-4)]
if dev=='cpu': cfgs=[dict(steps=2,gram=16,texts=8,batch_size=4,data_batch_size=2,data_length=64)]
for cfg in cfgs:
    br=cfg.pop('broad',False); t=time.time(); m=copy.deepcopy(m0); r=replace(UnloopRecipe(),refresh_every=25,**cfg)
    cur=unloop(m,s,broad if br else ws,r,lambda a,b:None)
    print('=======',br,cfg,[x['copied_share'] for x in cur],'loss',held_out_loss(m,hw,16),'sec',time.time()-t, flush=True); samples(m)
