//! Results: printed as a table or as one JSON object per line, and kept for the plot and the page.

use std::io;
use std::time::Duration;

use super::turns::Rounds;
use crate::output::print_lines;

/// Quantity and unit of a row.
#[allow(dead_code, reason = "the suites of the package benches use the rest")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Payload in GB/s, 10^9 bytes; more is better.
    Throughput,
    /// Batches per second; more is better.
    Batches,
    /// Steps per second of all workers; more is better.
    Steps,
    /// Millions of rows per second; more is better.
    Rows,
    /// Microseconds; less is better.
    Latency,
    /// Memory in KiB; less is better.
    Memory,
}

impl Unit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Unit::Throughput => "GB/s",
            Unit::Batches => "batches/s",
            Unit::Steps => "steps/s",
            Unit::Rows => "Mrows/s",
            Unit::Latency => "us",
            Unit::Memory => "KiB",
        }
    }
}

/// The measurements of one row: pushpull and its ceiling, interleaved.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) unit: Unit,
    /// Payload bytes, batches or rows of one operation.
    pub(crate) amount: u64,
    /// Durations of pushpull's operations, round by round.
    pub(crate) ours: Rounds,
    /// Durations of the ceiling's operations, round by round.
    pub(crate) ceiling: Rounds,
    /// Name of the ceiling.
    pub(crate) ceiling_name: &'static str,
}

/// The figures of one row.
#[derive(Clone, Debug)]
pub(crate) struct ReportLine {
    pub(crate) name: String,
    pub(crate) unit: Unit,
    /// Median over the rounds, or over all operations for a latency.
    pub(crate) ours: f64,
    /// `None` if there is no ceiling.
    pub(crate) ceiling: Option<f64>,
    /// 99th percentile of a latency.
    pub(crate) p99: Option<f64>,
    pub(crate) ceiling_name: &'static str,
    /// Number of rounds.
    pub(crate) rounds: usize,
}

/// Prints and keeps the rows of a run.
#[derive(Debug)]
pub(crate) struct Report {
    json: bool,
    lines: Vec<ReportLine>,
}

impl Report {
    pub(crate) fn new(json: bool) -> Report {
        Report { json, lines: Vec::new() }
    }

    /// Summarizes, prints and keeps a row.
    pub(crate) fn row(&mut self, row: Row) -> io::Result<ReportLine> {
        self.line(row.line())
    }

    /// Prints and keeps figures that were not measured in rounds of operations.
    pub(crate) fn line(&mut self, line: ReportLine) -> io::Result<ReportLine> {
        if !self.json && self.lines.is_empty() {
            let heads = ["name", "ours", "ceiling", "ratio", "unit", "ceiling is"];
            let [name, ours, ceiling, ratio, unit, ceiling_name] = heads;
            print_lines(&format!(
                "{name:<32} {ours:>9} {ceiling:>9} {ratio:>7}  {unit:<9}  {ceiling_name}"
            ))?;
        }
        print_lines(&if self.json { line.json() } else { line.text() })?;
        self.lines.push(line.clone());
        Ok(line)
    }

    /// Returns all rows so far.
    pub(crate) fn lines(&self) -> &[ReportLine] {
        &self.lines
    }
}

impl Row {
    fn line(&self) -> ReportLine {
        let line = |ours, ceiling, p99| ReportLine {
            name: self.name.clone(),
            unit: self.unit,
            ours,
            ceiling: Some(ceiling),
            p99,
            ceiling_name: self.ceiling_name,
            rounds: self.ours.len(),
        };
        match self.unit {
            Unit::Latency => {
                let p99 = latency(&self.ours, 0.99);
                line(latency(&self.ours, 0.5), latency(&self.ceiling, 0.5), Some(p99))
            }
            _ => line(self.rate(&self.ours), self.rate(&self.ceiling), None),
        }
    }

    /// Returns the median over rounds of the rate of each round, in the unit of the row.
    fn rate(&self, rounds: &Rounds) -> f64 {
        let scale = match self.unit {
            Unit::Batches | Unit::Steps => 1.0,
            Unit::Rows => 1e-6,
            _ => 1e-9,
        };
        let rate = |round: &Vec<Duration>| {
            let seconds: f64 = round.iter().map(Duration::as_secs_f64).sum();
            self.amount as f64 * scale * round.len() as f64 / seconds
        };
        quantile(&mut rounds.iter().map(rate).collect::<Vec<f64>>(), 0.5)
    }
}

impl ReportLine {
    /// Returns the ratio of our figure to the ceiling, if there is one.
    #[allow(dead_code, reason = "a suite of the package benches uses it")]
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.compared().map(|(_, ratio)| ratio)
    }

    /// Returns the ceiling and the ratio to it.
    fn compared(&self) -> Option<(f64, f64)> {
        self.ceiling.map(|ceiling| (ceiling, self.ours / ceiling))
    }

    /// Names and units need no escaping: they contain no quotes or backslashes.
    fn json(&self) -> String {
        let ReportLine { name, ours, ceiling_name, rounds, .. } = self;
        let figures = match self.p99 {
            Some(p99) => format!("\"p50_us\":{ours:.2},\"p99_us\":{p99:.2}"),
            None => format!("\"ours\":{ours:.6}"),
        };
        let compared = self.compared().map(|(ceiling, ratio)| {
            format!(
                "\"ceiling\":{ceiling:.6},\"ratio\":{ratio:.3},\"ceiling_is\":\"{ceiling_name}\","
            )
        });
        let compared = compared.unwrap_or_default();
        let unit = self.unit.name();
        format!("{{\"name\":\"{name}\",{figures},{compared}\"unit\":\"{unit}\",\"n\":{rounds}}}")
    }

    /// Formats our figure, the ceiling and the ratio, with a dash for a missing one.
    pub(crate) fn figures(&self) -> [String; 3] {
        let dash = || "-".to_owned();
        let (ceiling, ratio) = self.compared().map_or((dash(), dash()), |compared| {
            (three_digits(compared.0), format!("{:.3}", compared.1))
        });
        [three_digits(self.ours), ceiling, ratio]
    }

    fn text(&self) -> String {
        let ReportLine { name, ceiling_name, .. } = self;
        let [ours, ceiling, ratio] = self.figures();
        let unit = self.unit.name();
        let p99 = self.p99.map(|p99| format!(" (p99 of ours {p99:.1})")).unwrap_or_default();
        format!("{name:<32} {ours:>9} {ceiling:>9} {ratio:>7}  {unit:<9}  {ceiling_name}{p99}")
    }
}

/// Formats a figure with at least three significant digits.
fn three_digits(value: f64) -> String {
    let before = value.abs().log10().floor();
    let decimals = if before.is_finite() { (2.0 - before).clamp(1.0, 6.0) } else { 1.0 };
    format!("{value:.*}", decimals as usize)
}

/// Returns a quantile over all operations of all rounds, in microseconds.
pub(crate) fn latency(rounds: &Rounds, share: f64) -> f64 {
    let mut all: Vec<f64> = rounds.iter().flatten().map(|d| d.as_secs_f64() * 1e6).collect();
    quantile(&mut all, share)
}

/// Sorts the values and returns the one below which this share of them is.
pub(crate) fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let index = (share * (values.len().saturating_sub(1)) as f64).round() as usize;
    values.get(index).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(millis: &[u64]) -> Vec<Duration> {
        millis.iter().copied().map(Duration::from_millis).collect()
    }

    #[test]
    fn a_rate_is_the_median_over_the_rounds() {
        let ours = vec![round(&[100, 300]), round(&[400, 400]), round(&[1000])];
        let ceiling = vec![round(&[50]); 3];
        let name = "a".to_owned();
        let unit = Unit::Batches;
        let ceiling_name = "b";
        let row = Row { name, unit, amount: 20, ours, ceiling, ceiling_name };
        let line = row.line();
        for (rate, expected) in [line.ours, line.ceiling.unwrap(), line.ratio().unwrap()]
            .into_iter()
            .zip([50.0, 400.0, 0.125])
        {
            assert!((rate - expected).abs() < 1e-9, "{rate} {expected}");
        }
        let row = Row { unit: Unit::Throughput, amount: 1_000_000_000, ..row };
        assert!((row.line().ours - 2.5).abs() < 1e-9);
    }

    #[test]
    fn a_latency_is_the_median_over_all_operations() {
        let ours = vec![round(&[1, 2]), round(&[3, 4, 100])];
        let ceiling = vec![round(&[2])];
        let name = "latency".to_owned();
        let unit = Unit::Latency;
        let line = Row { name, unit, amount: 8, ours, ceiling, ceiling_name: "pingpong" }.line();
        let printed: serde_json::Value = serde_json::from_str(&line.json()).unwrap();
        let expected = serde_json::json!({
            "name": "latency", "p50_us": 3000.0, "p99_us": 100_000.0, "ceiling": 2000.0,
            "ratio": 1.5, "unit": "us", "ceiling_is": "pingpong", "n": 2,
        });
        assert_eq!(printed, expected);
        let alone = ReportLine { ceiling: None, p99: None, ..line.clone() };
        let printed: serde_json::Value = serde_json::from_str(&alone.json()).unwrap();
        let expected =
            serde_json::json!({ "name": "latency", "ours": 3000.0, "unit": "us", "n": 2 });
        assert_eq!(printed, expected);
        let text = line.text();
        assert!(text.contains(" 3000.0 ") && text.ends_with("pingpong (p99 of ours 100000.0)"));
    }

    #[test]
    fn figures_keep_three_significant_digits() {
        for (value, text) in [
            (0.001_234, "0.00123"),
            (0.5, "0.500"),
            (12.34, "12.3"),
            (3e5, "300000.0"),
            (0.0, "0.0"),
        ] {
            assert_eq!(three_digits(value), text);
        }
    }
}
