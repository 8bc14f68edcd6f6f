//! Results: a table for people, or one JSON object a line.

use std::io::{self, Write};
use std::time::Duration;

/// What is measured in what unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Payload bytes over time; more is better.
    Throughput,
    /// Batches over time; more is better.
    Batches,
    /// Millions of rows over time; more is better.
    Rows,
    /// Microseconds; less is better.
    Latency,
}

/// One row: ours and the ceiling, measured in turns.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) unit: Unit,
    /// What one operation moves: payload bytes, batches, or rows.
    pub(crate) amount: u64,
    /// The durations of our operations, round by round.
    pub(crate) ours: Vec<Vec<Duration>>,
    /// Those of the ceiling.
    pub(crate) ceiling: Vec<Vec<Duration>>,
}

/// The value that a share of the sorted values lies below.
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let index = (share * (values.len().saturating_sub(1)) as f64).round() as usize;
    values.get(index).copied().unwrap_or(f64::NAN)
}

impl Row {
    /// The median over rounds of each round's throughput: GB/s, batches or millions of rows a second.
    fn throughput(&self, rounds: &[Vec<Duration>]) -> f64 {
        let scale = match self.unit {
            Unit::Batches => 1.0,
            Unit::Rows => 1e-6,
            _ => 1e-9,
        };
        let mut rates: Vec<f64> = rounds
            .iter()
            .map(|round| {
                let seconds: f64 = round.iter().map(Duration::as_secs_f64).sum();
                self.amount as f64 * scale * round.len() as f64 / seconds
            })
            .collect();
        quantile(&mut rates, 0.5)
    }

    /// A quantile over all operations of all rounds, in microseconds.
    fn latency(rounds: &[Vec<Duration>], share: f64) -> f64 {
        let mut all: Vec<f64> = rounds.iter().flatten().map(|d| d.as_secs_f64() * 1e6).collect();
        quantile(&mut all, share)
    }

    /// Ours over the ceiling, of throughputs.
    pub(crate) fn ratio(&self) -> f64 {
        self.throughput(&self.ours) / self.throughput(&self.ceiling)
    }

    /// Prints the row.
    pub(crate) fn print(&self, json: bool) -> io::Result<()> {
        say(&self.line(json))
    }

    /// The row as it is printed.
    fn line(&self, json: bool) -> String {
        let (name, n) = (&self.name, self.ours.len());
        match self.unit {
            Unit::Throughput | Unit::Batches | Unit::Rows => {
                let unit = match self.unit {
                    Unit::Batches => "batches/s",
                    Unit::Rows => "Mrows/s",
                    _ => "GB/s",
                };
                let (ours, ceiling) = (self.throughput(&self.ours), self.throughput(&self.ceiling));
                let ratio = ours / ceiling;
                if json {
                    format!(
                        "{{\"name\":\"{name}\",\"ours\":{ours:.3},\"ceiling\":{ceiling:.3},\
                         \"ratio\":{ratio:.3},\"unit\":\"{unit}\",\"n\":{n}}}"
                    )
                } else {
                    format!("{name:<24} {ours:>9.3} {ceiling:>9.3} {ratio:>7.3}  {unit}")
                }
            }
            Unit::Latency => {
                let p50 = Row::latency(&self.ours, 0.5);
                let p99 = Row::latency(&self.ours, 0.99);
                let ceiling = Row::latency(&self.ceiling, 0.5);
                let ratio = p50 / ceiling;
                if json {
                    format!(
                        "{{\"name\":\"{name}\",\"p50_us\":{p50:.1},\"p99_us\":{p99:.1},\
                         \"ceiling\":{ceiling:.1},\"ratio\":{ratio:.3},\"unit\":\"us\",\"n\":{n}}}"
                    )
                } else {
                    format!("{name:<24} {p50:>9.1} {ceiling:>9.1} {ratio:>7.3}  us (p99 {p99:.1})")
                }
            }
        }
    }
}

/// Prints a line, or several; whoever reads them may go away.
pub(crate) fn say(lines: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{lines}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_median_of_the_rounds() {
        let round = |millis: &[u64]| millis.iter().copied().map(Duration::from_millis).collect();
        let ours = vec![round(&[100, 300]), round(&[400, 400]), round(&[1000])];
        let ceiling = vec![round(&[50]); 3];
        let row = Row { name: String::new(), unit: Unit::Batches, amount: 20, ours, ceiling };
        let rates = [row.throughput(&row.ours), row.throughput(&row.ceiling), row.ratio()];
        for (rate, expected) in rates.into_iter().zip([50.0, 400.0, 0.125]) {
            assert!((rate - expected).abs() < 1e-9, "{rate} {expected}");
        }
        let row = Row { unit: Unit::Throughput, amount: 1_000_000_000, ..row };
        assert!((row.throughput(&row.ours) - 2.5).abs() < 1e-9);
    }
}
