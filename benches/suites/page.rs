//! Writes the figures of a run into a documentation page, between two marker lines.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use crate::bench::BenchError;
use crate::bench::report::ReportLine;

/// The marker lines around the figures.
const BEGIN: &str = "<!-- figures: begin -->";
const END: &str = "<!-- figures: end -->";

/// Replaces the figures of a page with those of this run: the machine, the command and a table.
pub(crate) fn write(path: &Path, lines: &[ReportLine]) -> Result<(), BenchError> {
    let page = fs::read_to_string(path)
        .map_err(|error| format!("--page {}: cannot read the page: {error}", path.display()))?;
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let command: Vec<String> = arguments.collect();
    let figures = format!(
        "On {}, by `cargo bench -p benches --bench suites -- {}`:\n\n{}",
        machine(&read("/proc/cpuinfo"), &read("/proc/meminfo"), &read("/proc/version")),
        command.join(" "),
        table(lines)
    );
    let replaced = replaced(&page, &figures)
        .ok_or_else(|| format!("--page {}: the page lacks {BEGIN} and {END}", path.display()))?;
    Ok(fs::write(path, replaced)?)
}

/// Returns the text of a file, or nothing if it cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Returns the page with other figures, or `None` if it lacks the markers.
fn replaced(page: &str, figures: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{figures}\n{END}{after}"))
}

/// Describes the machine, from the text of /proc/cpuinfo, /proc/meminfo and /proc/version.
fn machine(processors: &str, memory: &str, version: &str) -> String {
    let value = |text: &str, name: &str| {
        let of = |line: &str| line.strip_prefix(name)?.split_once(':').map(|at| at.1.trim().into());
        text.lines().find_map(of).unwrap_or_else(|| "unknown".to_owned())
    };
    let cores = processors.lines().filter(|line| line.starts_with("processor")).count();
    let kib = value(memory, "MemTotal");
    let gib = kib.trim_end_matches(" kB").parse::<f64>().map_or(0.0, |kib| kib / 1_048_576.0);
    let kernel = version.split_whitespace().nth(2).unwrap_or("unknown");
    let model = value(processors, "model name");
    let cache = value(processors, "cache size");
    format!("{cores} cores of {model} (cache {cache}), {gib:.0} GiB of memory, Linux {kernel}")
}

/// The ends of the names of rows that were measured on one processor and on two.
const ONE: &str = "_cpus1";
const TWO: &str = "_cpus2";

/// Returns the table of the rows. What was measured on one processor stands beside the same on two.
fn table(lines: &[ReportLine]) -> String {
    let mut table = String::from(
        "| row | ours | ceiling | ratio | ours on one core | ratio there | unit | the ceiling is |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |\n",
    );
    let others = lines.iter().filter(|line| !line.name.ends_with(ONE));
    for line in others {
        let name = line.name.trim_end_matches(TWO);
        let on_one = lines.iter().find(|one| one.name.strip_suffix(ONE) == Some(name));
        let dash = || "-".to_owned();
        let [ours_on_one, _, ratio_on_one] =
            on_one.map_or([dash(), dash(), dash()], ReportLine::figures);
        let [ours, ceiling, ratio] = line.figures();
        let (unit, ceiling_name) = (line.unit.name(), line.ceiling_name);
        let p99 = line.p99.map(|p99| format!(", p99 {p99:.1}")).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(
            table,
            "| `{name}` | {ours} | {ceiling} | {ratio} | {ours_on_one} | {ratio_on_one} | {unit}{p99} | \
             {ceiling_name} |"
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Unit;

    #[test]
    fn only_the_figures_of_a_page_are_replaced() {
        let page = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let once = replaced(&page, "new\n").unwrap();
        assert_eq!(once, format!("before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"));
        assert_eq!(replaced(&once, "new\n").unwrap(), once, "replacement is idempotent");
        assert_eq!(replaced("no place", "new"), None);
        assert_eq!(replaced(&format!("{END} {BEGIN}"), "new"), None);
    }

    #[test]
    fn the_machine_is_described_from_proc() {
        let processors = "processor\t: 0\nmodel name\t: Some CPU\ncache size\t: 512 KB\n\
                          processor\t: 1\nmodel name\t: Some CPU\n";
        let said = machine(processors, "MemTotal:       25165824 kB\n", "Linux version 6.1.0 (x)");
        let expected = "2 cores of Some CPU (cache 512 KB), 24 GiB of memory, Linux 6.1.0";
        assert_eq!(said, expected);
        assert!(machine("", "", "").contains("unknown"));
    }

    #[test]
    fn the_table_has_a_row_for_each_line() {
        let name = "a".to_owned();
        let unit = Unit::Latency;
        let ceiling_name = "b";
        let line = ReportLine {
            name,
            unit,
            ours: 3.0,
            ceiling: Some(2.0),
            p99: Some(9.0),
            ceiling_name,
            rounds: 5,
        };
        let alone = ReportLine { ceiling: None, p99: None, ..line.clone() };
        let on = |end| ReportLine { name: format!("c{end}"), ours: 1.0, ..line.clone() };
        let table = table(&[line.clone(), alone, on(ONE), on(TWO)]);
        let rows: Vec<&str> = table.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| `a` | 3.00 | 2.00 | 1.500 | - | - | us, p99 9.0 | b |",
                "| `a` | 3.00 | - | - | - | - | us | b |",
                "| `c` | 1.00 | 2.00 | 0.500 | 1.00 | 0.500 | us, p99 9.0 | b |",
            ]
        );
    }
}
