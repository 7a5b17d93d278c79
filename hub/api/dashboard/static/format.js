// Numbers, times and states as words. What is not known is a dash.

export const UNKNOWN = "–";

// A sign for each tone, so that colour alone says nothing.
const SIGNS = { good: "●", quiet: "○", warn: "▲", bad: "✖" };
export const sign = (tone) => SIGNS[tone] ?? "";

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 0.0995) return `${(value * 1000).toPrecision(2).replace(/\.0$/, "")} ms`;
  if (value < 60) return `${value.toPrecision(2)} s`;
  return age(value);
}

export function age(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value === 0) return "0/s";
  return value < 10 ? `${Number(value.toPrecision(2))}/s` : `${Math.round(value)}/s`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
