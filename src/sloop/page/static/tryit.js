// One request to a model: a form by its signature, the answer, and the same request for other clients.

import { useEffect, useState } from "preact/hooks";
import { state } from "sloop/store";
import { ask, Field, html, ms, OFFLINE, Problem } from "sloop/words";

const IMAGE = [1, 3, 4];

/** The shape of one row, with 1 for open dimensions. */
function shapeOf(input) {
  return input.shape.map((size) => (size > 0 ? size : 1));
}

const product = (shape) => shape.reduce((all, size) => all * size, 1);

function zeros(input) {
  const count = product(shapeOf(input));
  if (count > 64) return "";
  return JSON.stringify(Array(count).fill(input.datatype === "BYTES" ? "" : 0));
}

/** Whether an image fits: `[rows, channels, height, width]`, `[rows, height, width, channels]`, or grey without
    channels. */
function imageOf(input) {
  const [, ...shape] = shapeOf(input);
  if (shape.length === 2 && shape[0] > 4 && shape[1] > 4) return { channels: 1, height: shape[0], width: shape[1], first: true };
  if (shape.length !== 3) return null;
  if (IMAGE.includes(shape[0]) && shape[1] > 4) return { channels: shape[0], height: shape[1], width: shape[2], first: true };
  if (IMAGE.includes(shape[2]) && shape[0] > 4) return { channels: shape[2], height: shape[0], width: shape[1], first: false };
  return null;
}

/** The pixels of a file as numbers from 0 to 1 (0 to 255 for whole numbers), scaled to the input's shape. */
async function pixels(file, input) {
  const { channels, height, width, first } = imageOf(input);
  const bitmap = await createImageBitmap(file, { resizeWidth: width, resizeHeight: height });
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const scale = input.datatype.startsWith("FP") ? 1 / 255 : 1;
  const at = (pixel, channel) => (channels === 1
    ? (data[4 * pixel] + data[4 * pixel + 1] + data[4 * pixel + 2]) / 3
    : data[4 * pixel + channel]) * scale;
  const found = [];
  if (first) {
    for (let channel = 0; channel < channels; channel++) for (let pixel = 0; pixel < width * height; pixel++) found.push(at(pixel, channel));
  } else {
    for (let pixel = 0; pixel < width * height; pixel++) for (let channel = 0; channel < channels; channel++) found.push(at(pixel, channel));
  }
  return found.map((value) => (scale === 1 ? Math.round(value) : Number(value.toFixed(4))));
}

/** The values in a field: JSON, or numbers between commas and spaces, or one text. */
function valuesIn(text, input) {
  const trimmed = text.trim();
  if (trimmed.startsWith("[")) return JSON.parse(trimmed).flat(Infinity);
  if (input.datatype === "BYTES") return [text];
  const values = trimmed.split(/[\s,]+/).filter(Boolean).map(Number);
  if (values.some(Number.isNaN)) throw new Error(`${input.name}: write numbers, or a list as JSON`);
  return values;
}

/** The shape of so many values: open dimensions, the last of them first, take what the others leave. */
function shaped(input, count) {
  const shape = shapeOf(input);
  const open = input.shape.map((size, place) => (size > 0 ? -1 : place)).filter((place) => place >= 0);
  const rest = count / product(shape);
  if (open.length && Number.isInteger(rest)) shape[open[open.length - 1]] = Math.max(1, rest);
  return shape;
}

function commands(name, body) {
  const url = `${state.picture.server ?? "http://localhost:8000"}/v2/models/${name}/infer`;
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const inputs = body.inputs.map((input, place) => [
    `data${place} = np.array(${JSON.stringify(input.data)}, dtype=triton_to_np_dtype("${input.datatype}")).reshape(${JSON.stringify(input.shape)})`,
    `input${place} = client.InferInput(${JSON.stringify(input.name)}, ${JSON.stringify(input.shape)}, "${input.datatype}")`,
    `input${place}.set_data_from_numpy(data${place})`,
  ].join("\n"));
  return {
    curl: `curl -s ${url} -H 'content-type: application/json' -d '${quoted}'`,
    Python: `import json, urllib.request\n\nbody = json.loads(${JSON.stringify(JSON.stringify(body))})\nrequest = urllib.request.Request("${url}", json.dumps(body).encode(), {"content-type": "application/json"})\nprint(json.load(urllib.request.urlopen(request)))`,
    tritonclient: `import numpy as np\nimport tritonclient.http as client\nfrom tritonclient.utils import triton_to_np_dtype\n\n${inputs.join("\n")}\nserver = client.InferenceServerClient("${url.split("/")[2]}")\nprint(server.infer("${name}", [${body.inputs.map((_, place) => `input${place}`).join(", ")}]).get_response())`,
  };
}

function Input({ input, value, set, fail }) {
  const image = imageOf(input);
  const take = async (event) => {
    try {
      set(JSON.stringify(await pixels(event.target.files[0], input)));
    } catch (problem) {
      fail(new Error(`${input.name}: the file is no image that this browser can read (${problem.message})`));
    }
  };
  return html`<${Field} label=${`${input.name}: ${input.datatype} [${input.shape.join(", ")}]`}>
    <textarea rows="2" value=${value} onInput=${(event) => set(event.target.value)} spellcheck=${false}></textarea>
    ${image ? html`<input type="file" accept="image/*" aria-label=${`an image for ${input.name}`} onChange=${take} />` : null}
  </${Field}>`;
}

export function TryIt() {
  const names = Object.keys(state.picture.applications);
  const [name, setName] = useState(names[0] ?? "");
  const [signature, setSignature] = useState(null);
  const [values, setValues] = useState({});
  const [sent, setSent] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (!name || !state.isLive) return;
    setError(null);
    setSent(null);
    ask(`/v2/models/${encodeURIComponent(name)}`).then((found) => {
      setSignature(found);
      setValues(Object.fromEntries(found.inputs.map((input) => [input.name, zeros(input)])));
    }).catch(setError);
  }, [name]);
  const send = async (event) => {
    event.preventDefault();
    setError(null);
    try {
      const inputs = signature.inputs.map((input) => {
        const data = valuesIn(values[input.name], input);
        return { name: input.name, datatype: input.datatype, shape: shaped(input, data.length), data };
      });
      const body = { inputs };
      const began = performance.now();
      const answer = await ask(`/v2/models/${encodeURIComponent(name)}/infer`, JSON.stringify(body));
      setSent({ answer, tookMs: performance.now() - began, commands: commands(name, body) });
    } catch (problem) {
      setError(problem);
    }
  };
  if (!state.isLive) return html`<p class="soft">${OFFLINE}</p>`;
  return html`
    <form class="ask" onSubmit=${send}>
      <${Field} label="Model"><select value=${name} onChange=${(event) => setName(event.target.value)}>${names.map((one) => html`<option>${one}</option>`)}</select></${Field}>
      ${signature?.inputs.map((input) => html`<${Input} key=${input.name} input=${input} value=${values[input.name]} fail=${setError}
        set=${(value) => setValues({ ...values, [input.name]: value })} />`)}
      <button disabled=${!signature}>Send one request</button>
    </form>
    <${Problem} error=${error} />
    ${sent ? html`<article>
      <p role="status">Answered after ${ms(sent.tookMs)}, with the way through the page's process.</p>
      <pre>${JSON.stringify(sent.answer, null, 1).slice(0, 20000)}</pre>
      ${Object.entries(sent.commands).map(([client, command]) => html`<h3>${client}</h3><pre>${command.slice(0, 20000)}</pre>`)}
    </article>` : null}`;
}
