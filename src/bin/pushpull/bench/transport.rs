//! Suite `transport`: pulls and pushes of whole models beside the bare transport.

use std::time::Duration;

use super::bed::{BenchModel, Target, TestBed, at_once};
use super::ceiling::{
    GradientHandoff, Memcpy, PayloadDirection, PingPong, RoundTrip, RuleInPlace, SharedWord,
    tcp_pair,
};
use super::options::TransportOptions;
use super::processors::on_processors;
use super::report::{Report, Row, Unit};
use super::tls::TlsPingPong;
use super::turns::{Pace, interleave};
use super::{BenchError, Transport, bytes_of};

/// Bytes that each of several concurrent workers moves in one operation.
const OPERATION_BYTES: usize = 8 << 20;
/// Maximum number of pulls or pushes in one operation.
const OPERATION_REPEATS_MAX: usize = 256;

/// Measures these sizes over the transports of the options, or with the daemons of `--address`.
pub(crate) fn run(
    options: &TransportOptions,
    sizes: &[String],
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    if let Some(address) = options.transport_suite.address.first() {
        let [size] = sizes else {
            return Err(
                "cannot measure several sizes with --address: the variables of a daemon are \
                        declared once, so say one of --sizes"
                    .into(),
            );
        };
        let at = Target::Daemons {
            addresses: &options.transport_suite.address,
            rate: options.transport_suite.learning_rate,
        };
        let mut ways = options.transport.iter().filter(|transport| transport.fits(address));
        return ways.try_for_each(|&way| measure(options, at, way, size, "", pace, report));
    }
    let at = Target::InProcess { shards: options.transport_suite.shards };
    let mut all = |end: &str| {
        options.transport.iter().try_for_each(|&transport| {
            sizes
                .iter()
                .try_for_each(|size| measure(options, at, transport, size, end, pace, report))
        })
    };
    match &options.transport_suite.processors[..] {
        [] => all(""),
        few => {
            few.iter().try_for_each(|&count| on_processors(count, || all(&format!("_cpus{count}"))))
        }
    }
}

fn measure(
    options: &TransportOptions,
    at: Target<'_>,
    transport: Transport,
    size: &str,
    placement: &str,
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    let bytes = bytes_of(size)?;
    let variables = options.transport_suite.variables as usize;
    let replicas = options.transport_suite.replicas as usize;
    let bed = TestBed::start(at, transport, BenchModel { bytes, variables }, replicas)?;
    let mut end = format!("_{}_{size}", transport.name());
    for (what, count, usual) in [
        ("variables", variables, 1),
        ("replicas", replicas, 1),
        ("shards", options.transport_suite.shards.into(), 1),
    ] {
        if count != usual {
            end.push_str(&format!("_{what}{count}"));
        }
    }
    end.push_str(placement);
    let times = match replicas {
        1 => 1,
        _ => (OPERATION_BYTES / bytes).clamp(1, OPERATION_REPEATS_MAX),
    };
    let mut rows = TransportRows { bed, transport, bytes, replicas, times, end, pace, report };
    // The ceiling of small messages is a ping-pong, that of large ones the bare transport.
    if bytes <= 64 && replicas == 1 {
        rows.latency()?;
    }
    match transport.is_shared() {
        true => rows.in_shared_memory()?,
        false => {
            rows.beside_round_trips("pull", PayloadDirection::Pull)?;
            rows.beside_round_trips("push", PayloadDirection::Push)?;
        }
    }
    rows.bed.check()
}

/// The measured rows of one size over one transport.
struct TransportRows<'a> {
    bed: TestBed,
    transport: Transport,
    bytes: usize,
    replicas: usize,
    /// Number of pulls or pushes of each replica in one operation.
    times: usize,
    /// Common suffix of the row names.
    end: String,
    pace: Pace,
    report: &'a mut Report,
}

impl TransportRows<'_> {
    fn latency(&mut self) -> Result<(), BenchError> {
        let pace = self.pace;
        let bed = &mut self.bed;
        let ours = || bed.turn(PayloadDirection::Pull, 1);
        let ((ours, ceiling), ceiling_name) = match self.transport {
            Transport::Shm => {
                let mut ceiling = SharedWord::start(|| ());
                (interleave(pace, ours, || ceiling.once())?, "a shared word, two threads")
            }
            Transport::Tls => {
                let (client, server) = tcp_pair()?;
                let mut ceiling = TlsPingPong::start(client, server)?;
                (interleave(pace, ours, || Ok(ceiling.once()?))?, TlsPingPong::NAME)
            }
            transport => {
                let mut ceiling = PingPong::start(transport)?;
                (interleave(pace, ours, || Ok(ceiling.once()?))?, PingPong::name(transport))
            }
        };
        let name = format!("latency_pull{}", self.end);
        let unit = Unit::Latency;
        let amount = self.bytes as u64;
        self.report.row(Row { name, unit, amount, ours, ceiling, ceiling_name })?;
        Ok(())
    }

    /// Measures pulls and pushes in shared memory, then pushes that find no free buffer slot and
    /// are sent like those over the bare transport.
    fn in_shared_memory(&mut self) -> Result<(), BenchError> {
        let bytes = self.bytes;
        let copying = || Ok(Memcpy::new(bytes));
        self.measure_beside(
            "pull",
            PayloadDirection::Pull,
            copying,
            |ceiling| Ok(ceiling.once()),
            "memcpy",
        )?;
        let applying = || Ok(RuleInPlace::new(bytes)?);
        self.measure_beside(
            "push",
            PayloadDirection::Push,
            applying,
            |ceiling| Ok(ceiling.once()),
            "the rule in place",
        )?;
        if self.replicas == 1 {
            self.handed()?;
        }
        self.bed.use_up_buffer_slots();
        self.beside_round_trips("push_copied", PayloadDirection::Push)
    }

    /// Measures a push without its messages.
    fn handed(&mut self) -> Result<(), BenchError> {
        let mut handing = GradientHandoff::start(self.bytes)?;
        let mut applying = RuleInPlace::new(self.bytes)?;
        let (ours, ceiling) = interleave(self.pace, || handing.once(), || Ok(applying.once()))?;
        let name = format!("handed{}", self.end);
        let unit = Unit::Throughput;
        let amount = self.bytes as u64;
        let ceiling_name = "the rule in place";
        self.report.row(Row { name, unit, amount, ours, ceiling, ceiling_name })?;
        Ok(())
    }

    fn beside_round_trips(
        &mut self,
        verb: &str,
        direction: PayloadDirection,
    ) -> Result<(), BenchError> {
        let transport = self.transport;
        let bytes = self.bytes;
        let start = || Ok(RoundTrip::start(transport, direction, bytes)?);
        self.measure_beside(
            verb,
            direction,
            start,
            |ceiling| Ok(ceiling.once()?),
            RoundTrip::name(transport, direction),
        )
    }

    /// Measures all replicas at once, interleaved with as many ceilings at once.
    fn measure_beside<C: Send>(
        &mut self,
        verb: &str,
        direction: PayloadDirection,
        start: impl Fn() -> Result<C, BenchError>,
        once: impl Fn(&mut C) -> Result<Duration, BenchError> + Sync,
        ceiling_name: &'static str,
    ) -> Result<(), BenchError> {
        let bed = &mut self.bed;
        let times = self.times;
        let replicas = self.replicas;
        let mut ceilings = (0..replicas).map(|_| start()).collect::<Result<Vec<C>, _>>()?;
        let ceiling = || at_once(&mut ceilings, times, &once);
        let (ours, ceiling) = interleave(self.pace, || bed.turn(direction, times), ceiling)?;
        let name = format!("{verb}{}", self.end);
        let unit = Unit::Throughput;
        let amount = (self.bytes * times * replicas) as u64;
        self.report.row(Row { name, unit, amount, ours, ceiling, ceiling_name })?;
        Ok(())
    }
}
