//! Suite `scale`: pulls and pushes with many variables and with many connections.

use std::time::{Duration, Instant};

use pushpull::ClusterSpec;
use pushpull::cluster::ShardId;
use pushpull::protocol::message::{Pull, Role, Selection};

use super::daemon::expect;
use super::probe::ProbeConnection;
use crate::bench::bed::{BenchModel, Target, TestBed};
use crate::bench::ceiling::PayloadDirection;
use crate::bench::report::{Report, ReportLine, Row, Unit};
use crate::bench::turns::{Pace, interleave};
use crate::bench::{BenchError, Transport};
use crate::options::SuitesOptions;

/// Size in bytes of the model that is divided into many variables.
const MODEL_BYTES: usize = 4 << 20;

/// Size in bytes of the model that many connections pull.
const SMALL_BYTES: usize = 64;

/// Measures hundreds, thousands and so on, up to the counts of the options.
pub(crate) fn run(
    options: &SuitesOptions,
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    let transport = options.transports.transport.first().copied().unwrap_or(Transport::Tcp);
    let mut worst: Option<ReportLine> = None;
    for variables in counts(options.sizes.scale_variables) {
        for (verb, direction) in
            [("pull", PayloadDirection::Pull), ("push", PayloadDirection::Push)]
        {
            let mut one = bed(transport, MODEL_BYTES, 1)?;
            let mut many = bed(transport, MODEL_BYTES, variables)?;
            let (ours, theirs) =
                interleave(pace, || many.turn(direction, 1), || one.turn(direction, 1))?;
            one.check()?;
            many.check()?;
            let name = format!("scale_variables_{variables}_{verb}");
            keep_worst(&mut worst, report.row(row(name, ours, theirs, "one variable"))?);
        }
    }
    summary("scale_variables", worst, report)?;
    let mut worst = None;
    for connections in counts(options.sizes.scale_connections) {
        let mut one = ReaderConnections::start(transport, 1)?;
        let mut many = ReaderConnections::start(transport, connections)?;
        let (ours, theirs) = interleave(pace, || many.pull(), || one.pull())?;
        let name = format!("scale_connections_{connections}_pull");
        keep_worst(&mut worst, report.row(row(name, ours, theirs, "one connection"))?);
        let (ours, theirs) = interleave(
            pace,
            || many.bed.turn(PayloadDirection::Push, 1),
            || one.bed.turn(PayloadDirection::Push, 1),
        )?;
        one.bed.check()?;
        many.bed.check()?;
        let name = format!("scale_connections_{connections}_push");
        keep_worst(&mut worst, report.row(row(name, ours, theirs, "one connection"))?);
    }
    summary("scale_connections", worst, report)
}

/// Returns the powers of ten from 100 that are below `most`, then `most`.
fn counts(most: u32) -> impl Iterator<Item = usize> {
    let most = most as usize;
    let powers = (1..).map(|power| 10_usize.pow(power)).take_while(move |&count| count < most);
    powers.filter(|count| *count != 10).chain([most])
}

fn bed(transport: Transport, bytes: usize, variables: usize) -> Result<TestBed, BenchError> {
    TestBed::start(Target::InProcess { shards: 1 }, transport, BenchModel { bytes, variables }, 1)
}

fn row(
    name: String,
    ours: Vec<Vec<Duration>>,
    ceiling: Vec<Vec<Duration>>,
    ceiling_name: &'static str,
) -> Row {
    Row { name, unit: Unit::Latency, amount: 1, ours, ceiling, ceiling_name }
}

/// Keeps the line with the largest ratio.
fn keep_worst(worst: &mut Option<ReportLine>, line: ReportLine) {
    let ratio = |line: &ReportLine| line.ratio().unwrap_or(f64::NAN);
    if worst.as_ref().is_none_or(|worst| ratio(&line) > ratio(worst)) {
        *worst = Some(line);
    }
}

/// Prints the worst of several lines under a name of its own.
fn summary(name: &str, worst: Option<ReportLine>, report: &mut Report) -> Result<(), BenchError> {
    if let Some(worst) = worst {
        report.line(ReportLine { name: name.to_owned(), ..worst })?;
    }
    Ok(())
}

/// A server and many reader connections, which pull in rotation.
struct ReaderConnections {
    bed: TestBed,
    connections: Vec<ProbeConnection>,
    next: usize,
}

impl ReaderConnections {
    fn start(transport: Transport, count: usize) -> Result<ReaderConnections, BenchError> {
        let bed = bed(transport, SMALL_BYTES, 1)?;
        let cluster: &ClusterSpec = bed.cluster();
        let open = |_| -> Result<ProbeConnection, BenchError> {
            let connection = ProbeConnection::open(cluster, ShardId::default(), Role::Reader {})?;
            connection.ok_or_else(|| "the server refused a reader".into())
        };
        let connections = (0..count).map(open).collect::<Result<Vec<_>, _>>()?;
        Ok(ReaderConnections { bed, connections, next: 0 })
    }

    /// Pulls over the next connection.
    fn pull(&mut self) -> Result<Duration, BenchError> {
        let count = self.connections.len();
        let connection = &mut self.connections[self.next % count];
        self.next += 1;
        let start = Instant::now();
        connection.send(Pull { selection: Selection::All {} }.into(), &[])?;
        expect(connection, "Pulled")?;
        Ok(start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_powers_of_ten_and_the_maximum() {
        let of = |most| counts(most).collect::<Vec<_>>();
        assert_eq!(of(1000), [100, 1000]);
        assert_eq!(of(2500), [100, 1000, 2500]);
        assert_eq!(of(7), [7]);
    }
}
