//! What a pull and a push cost as variables and connections become many.

use std::time::{Duration, Instant};

use pushpull::common::protocol::message::{Pull, Role, Selection};
use pushpull::{ClusterSpec, ShardId};

use super::bed::{At, Model, TestBed};
use super::ceiling::Way;
use super::daemon::expect;
use super::probe::Line as Connection;
use super::report::{Line, Report, Row, Unit};
use super::turns::{Pace, take_turns};
use super::{Failure, Options, Transport};

/// The bytes of a model, however many variables it is divided into.
const MODEL_BYTES: usize = 4 << 20;

/// The bytes of the model that many connections pull.
const SMALL_BYTES: usize = 64;

/// Measures tens, hundreds, thousands, up to as many as the options say.
pub(crate) fn run(options: &Options, pace: Pace, report: &mut Report) -> Result<(), Failure> {
    let transport = options.transport.first().copied().unwrap_or(Transport::Tcp);
    let mut worst: Option<Line> = None;
    for variables in counts(options.scale_variables) {
        for (verb, way) in [("pull", Way::Pull), ("push", Way::Push)] {
            let mut one = bed(transport, MODEL_BYTES, 1)?;
            let mut many = bed(transport, MODEL_BYTES, variables)?;
            let (ours, theirs) = take_turns(pace, || many.turn(way, 1), || one.turn(way, 1))?;
            one.check()?;
            many.check()?;
            let name = format!("scale_variables_{variables}_{verb}");
            worse(&mut worst, report.row(row(name, ours, theirs, "one variable"))?);
        }
    }
    summary("scale_variables", worst, report)?;
    let mut worst = None;
    for connections in counts(options.scale_connections) {
        let mut one = Connected::start(transport, 1)?;
        let mut many = Connected::start(transport, connections)?;
        let (ours, theirs) = take_turns(pace, || many.pull(), || one.pull())?;
        let name = format!("scale_connections_{connections}_pull");
        worse(&mut worst, report.row(row(name, ours, theirs, "one connection"))?);
        let (ours, theirs) =
            take_turns(pace, || many.bed.turn(Way::Push, 1), || one.bed.turn(Way::Push, 1))?;
        one.bed.check()?;
        many.bed.check()?;
        let name = format!("scale_connections_{connections}_push");
        worse(&mut worst, report.row(row(name, ours, theirs, "one connection"))?);
    }
    summary("scale_connections", worst, report)
}

/// Powers of ten above one, and the most.
fn counts(most: u32) -> impl Iterator<Item = usize> {
    let most = most as usize;
    let tens = (1..).map(|power| 10_usize.pow(power)).take_while(move |&count| count < most);
    tens.filter(|count| *count != 10).chain([most])
}

fn bed(transport: Transport, bytes: usize, variables: usize) -> Result<TestBed, Failure> {
    TestBed::start(At::Here { shards: 1 }, transport, Model { bytes, variables }, 1)
}

fn row(
    name: String,
    ours: Vec<Vec<Duration>>,
    ceiling: Vec<Vec<Duration>>,
    beside: &'static str,
) -> Row {
    Row { name, unit: Unit::Latency, amount: 1, ours, ceiling, beside }
}

/// Keeps the line with the larger ratio.
fn worse(worst: &mut Option<Line>, line: Line) {
    let ratio = |line: &Line| line.ratio().unwrap_or(f64::NAN);
    if worst.as_ref().is_none_or(|worst| ratio(&line) > ratio(worst)) {
        *worst = Some(line);
    }
}

/// The worst of several lines under a name of their own.
fn summary(name: &str, worst: Option<Line>, report: &mut Report) -> Result<(), Failure> {
    if let Some(worst) = worst {
        report.line(Line { name: name.to_owned(), ..worst })?;
    }
    Ok(())
}

/// A server and many readers of it, each of which pulls in its turn.
struct Connected {
    bed: TestBed,
    connections: Vec<Connection>,
    next: usize,
}

impl Connected {
    fn start(transport: Transport, count: usize) -> Result<Connected, Failure> {
        let bed = bed(transport, SMALL_BYTES, 1)?;
        let cluster: &ClusterSpec = bed.cluster();
        let open = |_| -> Result<Connection, Failure> {
            let connection = Connection::open(cluster, ShardId::default(), Role::Reader {})?;
            connection.ok_or_else(|| "the server does not welcome a reader".into())
        };
        let connections = (0..count).map(open).collect::<Result<Vec<_>, _>>()?;
        Ok(Connected { bed, connections, next: 0 })
    }

    /// A pull by the connection whose turn it is.
    fn pull(&mut self) -> Result<Duration, Failure> {
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
    fn counts_are_powers_of_ten_and_the_most() {
        let of = |most| counts(most).collect::<Vec<_>>();
        assert_eq!(of(1000), [100, 1000]);
        assert_eq!(of(2500), [100, 1000, 2500]);
        assert_eq!(of(7), [7]);
    }
}
