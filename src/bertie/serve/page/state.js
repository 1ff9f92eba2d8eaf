// The state of a view: the values of its form, and the same in the fragment of the address, #/view?name=value.

const MAX_LINK = 8000; // characters; longer texts are left out of the address

/** The named controls of a form, radio buttons once. */
function controls(form) {
  const byName = new Map();
  for (const element of form.elements) if (element.name) byName.set(element.name, form.elements[element.name]);
  return byName;
}

function valueOf(control) {
  if (control instanceof RadioNodeList) return control.value;
  return control.type === "checkbox" ? (control.checked ? "1" : "") : control.value;
}

function defaultOf(control) {
  if (control instanceof RadioNodeList) return Array.from(control).find((radio) => radio.defaultChecked)?.value ?? "";
  if (control.type === "checkbox") return control.defaultChecked ? "1" : "";
  if (control instanceof HTMLSelectElement) return (Array.from(control.options).find((option) => option.defaultSelected) ?? control.options[0])?.value ?? "";
  return control.dataset.default ?? control.defaultValue;
}

function setValue(control, value) {
  if (control instanceof RadioNodeList) {
    for (const radio of control) radio.checked = radio.value === value;
  } else if (control.type === "checkbox") control.checked = value === "1";
  else if (control instanceof HTMLSelectElement) {
    if (Array.from(control.options).some((option) => option.value === value)) control.value = value;
  } else control.value = value;
}

export function readState(form) {
  const state = {};
  for (const [name, control] of controls(form)) state[name] = valueOf(control);
  return state;
}

/** Set the values of a form; what is not given is set to its default. */
export function writeState(form, values) {
  for (const [name, control] of controls(form)) setValue(control, Object.hasOwn(values, name) ? values[name] : defaultOf(control));
}

/** Make values the defaults of a form, as if its HTML had them. */
export function setDefaults(form, values) {
  for (const [name, control] of controls(form)) {
    if (!Object.hasOwn(values, name) || control instanceof RadioNodeList || control instanceof HTMLSelectElement) continue;
    control.dataset.default = values[name];
    control.value = values[name];
  }
}

/** The view and the values that a fragment names; of an unknown view, null. */
export function parseFragment(hash, views) {
  const [name, query] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return views.includes(name) ? { view: name, values: Object.fromEntries(new URLSearchParams(query ?? "")) } : null;
}

/** The fragment for a view: only values that differ from the defaults, and none that are too long for an address. */
export function makeFragment(view, form, extra = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(extra)) if (value) query.set(name, value);
  for (const [name, control] of controls(form)) {
    const value = valueOf(control);
    if (value !== defaultOf(control)) query.set(name, value);
  }
  const text = query.toString();
  return text && text.length <= MAX_LINK ? `#/${view}?${text}` : `#/${view}`;
}
