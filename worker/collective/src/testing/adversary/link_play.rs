//! Adversary test of an operation and the predecessor of its rank.

use std::io::{self, IoSliceMut};
use std::ops::Range;

use pushpull_common::codec::{Codec, Residual};
use pushpull_common::ids::Sequence;
use pushpull_common::protocol::message::{Collective, Heartbeat, RingPart};
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, encode};
use pushpull_common::tensor::DType;

use super::choices::RingChoices;
use crate::element::ElementKind;
use crate::encoded::{OwnElements, Stretches};
use crate::links::{Incoming, LinkFault};
use crate::reduction::Reduction;
use crate::running::{Operand, Running, Target, Task};
use crate::schedule::{Chunks, Schedule, ScheduleKind};
use crate::transfer::Transfer;

/// The most elements of a tensor.
const ELEMENTS_MAX: usize = 600;

/// The most frames of one stream. The smallest elements come one by one at the most.
const FRAMES_MAX: usize = 400;

/// The bytes of a tensor, aligned as those of any type.
#[derive(Clone, Debug)]
struct TensorBytes {
    words: Vec<u64>,
    length: usize,
}

impl TensorBytes {
    fn bytes(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.length]
    }
}

/// The elements of the rank in an encoded reduction.
struct EncodedElements {
    stretches: Stretches,
    values: Vec<f32>,
    residual: Residual<f32>,
}

impl EncodedElements {
    fn new(codec: Codec, elements: usize, ranks: u32) -> EncodedElements {
        EncodedElements {
            stretches: Stretches::new(codec, DType::F32, elements, ranks),
            values: (0..elements).map(|at| at as f32 - 7.5).collect(),
            residual: Residual::new(elements),
        }
    }

    fn own(&mut self) -> OwnElements<'_, f32> {
        OwnElements::new(self.stretches, &mut self.values, &mut self.residual)
    }

    /// Returns what an honest predecessor may send: stretches of equal elements.
    fn honest_body(&self, element: f32, bytes: usize) -> Vec<u8> {
        let width = self.stretches.width();
        let mut body = Vec::new();
        // A last stretch that is shorter is seldom guessed, and refused then.
        let values = vec![element; self.values.len().min(256)];
        while body.len() < bytes {
            let end = body.len() + width;
            self.stretches.codec().encode(&values, &mut body).expect("they are finite");
            body.resize(end, 0);
        }
        body.resize(bytes, 0);
        body
    }
}

/// An operation and its predecessor.
pub(super) struct LinkPlay<'a> {
    choices: RingChoices<'a>,
    running: Running,
    incoming: Incoming,
    tensor: TensorBytes,
    /// What an honest predecessor has sent.
    honest: Transfer,
    /// The bytes of an element or a stretch.
    width: usize,
    encoded: Option<EncodedElements>,
}

impl<'a> LinkPlay<'a> {
    pub(super) fn new(mut choices: RingChoices<'a>) -> LinkPlay<'a> {
        let ranks = 2 + choices.below(4) as u32;
        let rank = choices.below(ranks as usize) as u32;
        let root = choices.below(ranks as usize) as u32;
        let codec = choices.of(&[
            None,
            None,
            None,
            Some(Codec::F16),
            Some(Codec::Int8),
            Some(Codec::OneBit),
            Some(Codec::TopK { fraction: 0.1 }),
        ]);
        let kind = choices.of(&ElementKind::ALL);
        let elements = (choices.below(256) * 256 + choices.below(256)) % ELEMENTS_MAX;
        let schedule = choices.of(&[
            ScheduleKind::AllReduce,
            ScheduleKind::ReduceScatter,
            ScheduleKind::Gather,
            ScheduleKind::Broadcast { root },
        ]);
        let reduction = choices.of(&[Reduction::Sum, Reduction::Max, Reduction::Mean]);
        let reduction = if reduction.allows(kind) { reduction } else { Reduction::Min };
        let encoded = codec.map(|codec| EncodedElements::new(codec, 4 * elements, ranks));
        let stretches = encoded.as_ref().map(|encoded| encoded.stretches);
        let schedule = stretches.map_or(schedule, |_| ScheduleKind::AllReduce);
        let count = elements;
        let elements = stretches.map_or(elements, |stretches| stretches.count());
        let width = stretches.map_or(kind.size(), |stretches| stretches.width());
        let task = Task {
            collective: Collective::ReduceSum {},
            schedule,
            kind,
            reduction,
            count,
            elements,
            encoded: stretches,
            name: "w",
        };
        let length = elements * width;
        let chunks = Chunks::new(elements, width, ranks);
        let mut reader = FrameReader::new();
        reader.open();
        LinkPlay {
            running: Running::new(Sequence(9), &task, rank, ranks),
            incoming: Incoming::new(reader),
            tensor: TensorBytes { words: vec![0x4041_4041_4041_4041; length.div_ceil(8)], length },
            honest: Transfer::new(Schedule::new(schedule, rank, ranks, chunks)),
            width,
            encoded,
            choices,
        }
    }

    /// Plays all choices. Returns 1 if everything was received.
    pub(super) fn run(mut self) -> usize {
        let stream = self.stream();
        let mut rest = &stream[..];
        loop {
            let before = self.tensor.clone();
            let target = self.incoming.memory().1.cloned();
            let received = self.receive(&mut rest);
            let written = match &target {
                Some(Target::Store(range) | Target::Fold(range, _)) => range.clone(),
                None => 0..0,
            };
            self.check_writes(before, written);
            self.send();
            match received {
                Ok(_) if !self.running.expects() => {
                    assert!(self.running.is_done(), "everything has arrived, and is not sent on");
                    return self.finish();
                }
                Ok(_) => {}
                // An operation whose stream ends before its last byte fails, and is no success.
                Err(_) => return 0,
            }
        }
    }

    fn receive(&mut self, rest: &mut &[u8]) -> Result<bool, LinkFault> {
        let choices = &mut self.choices;
        let mut source = |slices: &mut [IoSliceMut<'_>]| {
            let step = match choices.below(8) {
                1 => return Err(io::ErrorKind::WouldBlock.into()),
                2 => return Err(io::ErrorKind::Interrupted.into()),
                3 => 1,
                4 | 5 => choices.below(256) + 1,
                _ => usize::MAX,
            };
            let mut now = &rest[..step.min(rest.len())];
            let mut count = 0;
            for slice in slices {
                count += io::Read::read(&mut now, slice)?;
            }
            *rest = &rest[count..];
            Ok(count)
        };
        let mut own = self.encoded.as_mut().map(EncodedElements::own);
        let mut operand = Operand::elements(self.tensor.bytes());
        if let Some(own) = &mut own {
            operand.contribution = Some(own);
        }
        self.incoming.receive(&mut source, &mut self.running, &mut operand)
    }

    /// Takes the result. Returns 1 if it is one.
    fn finish(&mut self) -> usize {
        let Some(encoded) = &mut self.encoded else { return 1 };
        let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
        assert!(finite(encoded.residual.left()), "a residual is finite after all that has arrived");
        usize::from(encoded.own().finish(self.tensor.bytes()).is_ok())
    }

    /// Checks that bytes outside a range are as before, and that memory for bodies is bounded.
    fn check_writes(&mut self, mut before: TensorBytes, written: Range<usize>) {
        let before = before.bytes();
        let after = self.tensor.bytes();
        let is_same = |range: Range<usize>| before[range.clone()] == after[range];
        assert!(is_same(0..written.start) && is_same(written.end..before.len()), "{written:?}");
        let length = before.len();
        let (memory, target) = self.incoming.memory();
        assert!(memory < length + 8, "{memory} bytes beside a tensor of {length}");
        if let Some(Target::Store(range) | Target::Fold(range, _)) = target {
            assert!(range.start < range.end && range.end <= length, "{range:?} of {length}");
        }
    }

    /// Sends what is due: the socket to the successor takes all.
    fn send(&mut self) {
        let _ = self.running.announcement();
        while let Some(part) = self.running.next_part(97 * self.width) {
            assert!(part.bytes.end <= self.tensor.length, "{part:?}");
            self.running.sent(part.bytes.len());
        }
    }

    /// Returns the bytes that the predecessor sends: an honest stream with any faults.
    fn stream(&mut self) -> Vec<u8> {
        let mut stream = Vec::new();
        let operation = self.running.operation().clone();
        let is_announced = !self.choices.one_in(24);
        if is_announced {
            let mut operation = operation.clone();
            operation.count = self.choices.around(operation.count);
            self.frame(&mut stream, operation.into(), 0);
        }
        for _ in 0..FRAMES_MAX {
            let Some((expected, _)) = self.honest.expected() else { break };
            let width = self.width;
            let elements = expected.bytes.len() / width;
            let most = match self.choices.below(3) {
                0 => 1 + self.choices.below(256),
                _ => elements,
            };
            let bytes = most.min(elements) * width;
            self.honest.received(bytes);
            if self.choices.one_in(64) {
                // The rest of the stream has other places.
                continue;
            }
            let part = RingPart {
                pass: self.choices_around(expected.pass.into()) as u32,
                offset: self.choices_around(expected.offset as u64),
            };
            let bytes = match self.choices.one_in(64) {
                true => self.choices.around(bytes as u64 + 1).min(1 << 20) as usize,
                false => bytes,
            };
            self.frame(&mut stream, part.into(), bytes);
            if self.choices.one_in(96) {
                let other: Message = match self.choices.below(3) {
                    0 => operation.clone().into(),
                    1 => Heartbeat {}.into(),
                    _ => RingPart { pass: 0, offset: 0 }.into(),
                };
                self.frame(&mut stream, other, 0);
            }
        }
        if self.choices.one_in(8) && !stream.is_empty() {
            let at = self.choices.below(256) * stream.len() / 256;
            stream[at] ^= 1 << self.choices.below(8);
        }
        if self.choices.one_in(8) {
            stream.truncate(self.choices.below(256) * stream.len() / 256);
        }
        stream
    }

    /// Returns a number that is seldom another one: a stream has many.
    fn choices_around(&mut self, honest: u64) -> u64 {
        match self.choices.one_in(48) {
            true => self.choices.around(honest),
            false => honest,
        }
    }

    fn frame(&mut self, stream: &mut Vec<u8>, message: Message, bytes: usize) {
        let sequence = Sequence(self.choices_around(9));
        let envelope = Envelope { sequence, ..Envelope::default() };
        let byte = self.choices.byte();
        let body = match &self.encoded {
            Some(encoded) if byte < 192 => encoded.honest_body(f32::from(byte) - 99.0, bytes),
            _ => vec![byte; bytes],
        };
        let crc = self.choices.one_in(4).then(|| crc32c::crc32c(&body));
        let stamp = match (bytes, crc) {
            (0, _) => BodyStamp::NONE,
            (bytes, crc) => BodyStamp { bytes: bytes as u64, crc },
        };
        encode(stream, &envelope, &message, stamp);
        stream.extend_from_slice(&body);
    }
}
