//! Messages as they arrive: encoded, and read from the bytes again.

use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{Collective, Hello, RingCodec, RingEnd, RingOperation};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, Poll, encode};

use super::choices::RingChoices;

/// Returns a message as it is read from a frame; `None` if it is not allowed there.
pub(super) fn framed(message: &Message) -> Option<Message> {
    let mut frame = Vec::new();
    encode(&mut frame, &Envelope::default(), message, BodyStamp::NONE);
    let mut reader = FrameReader::new();
    reader.open();
    match reader.poll(&mut slice_source(&frame)) {
        Ok(Poll::Frame(_, message)) => Some(message),
        _ => None,
    }
}

/// Returns a hello as the acceptor reads it.
pub(super) fn framed_hello(hello: Hello) -> Option<Box<Hello>> {
    let mut frame = Vec::new();
    encode(&mut frame, &Envelope::default(), &hello.into(), BodyStamp::NONE);
    match FrameReader::new().poll(&mut slice_source(&frame)) {
        Ok(Poll::Frame(_, Message::Hello(hello))) => Some(Box::new(hello)),
        _ => None,
    }
}

/// Returns any end of a ring.
pub(super) fn ring_end(choices: &mut RingChoices<'_>, rank: u64) -> RingEnd {
    let mut number = |honest: u64| choices.around(honest) as u32;
    let rank = number(rank);
    let other_rank = number(u64::from(rank) + 1);
    let operation = RingOperation {
        collective: Collective::Broadcast { root: rank },
        elements: other_rank as u8,
        count: choices.around(5),
        name: Text::clipped("w"),
        codec: choices.one_in(2).then_some(RingCodec::TopK { fraction: 0.5 }),
    };
    let detail = Detail::clipped("a fault");
    match choices.below(6) {
        0 => RingEnd::Lost {
            rank,
            host: Text::clipped("host"),
            silent_ms: choices.around(7),
            detail,
        },
        1 => RingEnd::Difference {
            number: choices.around(1),
            rank,
            operation: operation.clone(),
            other_rank,
            other: operation,
        },
        2 | 3 => RingEnd::GivenUp { rank, detail },
        4 => RingEnd::Left { rank },
        _ => RingEnd::Regrouped {},
    }
}
