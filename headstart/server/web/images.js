// Images of a question: chosen, pasted or dropped; kept as data URLs.
import { html, useRef } from "./ui.js";

const MOST_BYTES = 11 << 20; // of all images of a question: the server's limit of a request, in base64

const read = (file) =>
  new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });

/** The images among files, as data URLs. */
export const readImages = (files) => Promise.all([...files].filter(({ type }) => type.startsWith("image/")).map(read));

/** Error text for images above the size limit; empty within it. */
export const excess = (urls) =>
  urls.reduce((sum, { length }) => sum + length, 0) * 0.75 > MOST_BYTES ? "The images are larger than 11 MB." : "";

/** Images, with a button to remove each if `remove` is given. */
export function Images({ urls, remove }) {
  if (!urls?.length) return null;
  return html`<ul class="images" aria-label="Images">
    ${urls.map((url, i) => html`<li key=${url}>
      <img src=${url} alt=${`Image ${i + 1}`} />
      ${remove && html`<button type="button" class="icon" aria-label=${`Remove image ${i + 1}`} title="Remove"
        onClick=${() => remove(i)}>×</button>`}
    </li>`)}
  </ul>`;
}

const ICON = html`<svg viewBox="0 0 24 24" width="20" height="20" fill="none" stroke="currentColor" stroke-width="1.7" aria-hidden="true">
  <rect x="3" y="4" width="18" height="16" rx="2.5" /><circle cx="8.5" cy="9.5" r="1.7" /><path d="m4 18 6-5.5 3.5 3 3-2.5 4 4" />
</svg>`;

/** A button that opens the file dialog. */
export function ImageButton({ add }) {
  const input = useRef(null);
  const chosen = ({ target }) => {
    add(target.files);
    target.value = ""; // so that the same file can be chosen again
  };
  return html`<button type="button" class="icon" aria-label="Add images" title="Add images; or paste or drop them"
      onClick=${() => input.current.click()}>${ICON}</button>
    <input ref=${input} type="file" accept="image/*" multiple hidden aria-label="Image files" onChange=${chosen} />`;
}
