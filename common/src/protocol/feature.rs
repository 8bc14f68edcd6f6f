//! The features of the protocol: numbered bits in the handshake, and what they add to messages.
//!
//! A side names its features in its `Hello`, `Welcome` or `ServerIs`. A feature is **agreed** on a
//! connection if both sides have it. Only then does either side send the messages and fields that
//! belong to it. So a side without a feature meets nothing that it does not know.

use super::wire::{FieldReader, FieldSink, Wire};
use super::{Message, ProtocolError};

/// A set of features: the sum of their bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features(pub u64);

macro_rules! features {
    ($($(#[$doc:meta])* $number:literal => $name:ident;)*) => {
        impl Features {
            $($(#[$doc])* pub const $name: Features = Features(1 << $number);)*

            /// Every feature of this side.
            pub const ALL: Features = Features($(1 << $number)|*);

            /// Every feature with its number and its name.
            pub const NAMED: &'static [(u8, &'static str)] =
                &[$(($number, stringify!($name))),*];
        }
    };
}

features! {
    /// A grant names the samples that the client will probably be granted next.
    0 => READ_AHEAD;
    /// A server that stops for good says `Goodbye`.
    1 => GOODBYE;
}

impl Features {
    /// No feature: what both sides have before the handshake.
    pub const NONE: Features = Features(0);

    /// Returns whether all these features are in the set.
    pub fn contains(self, features: Features) -> bool {
        self.0 & features.0 == features.0
    }

    /// Returns the features that both sets have. Unknown bits of a peer are ignored so.
    pub fn agreed(self, peer: Features) -> Features {
        Features(self.0 & peer.0)
    }

    /// Returns the lowest number of a feature in `required` that this set lacks.
    pub fn first_missing(self, required: Features) -> Option<u8> {
        let missing = required.0 & !self.0;
        // Below 64, since a bit is set.
        (missing != 0).then(|| missing.trailing_zeros() as u8)
    }

    /// Returns the features that the peer names in the message that opens its side of a
    /// connection; `None` for any other message.
    pub fn of_peer(message: &Message) -> Option<Features> {
        match message {
            Message::Hello(hello) => Some(hello.features.has),
            Message::Welcome(welcome) => Some(welcome.features),
            Message::ServerIs(server) => Some(server.features),
            _ => None,
        }
    }
}

impl Wire for Features {
    fn put(&self, out: &mut impl FieldSink) {
        self.0.put(out);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        Ok(Features(u64::take(reader)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_bits_are_ignored_and_missing_ones_are_named() {
        let ours = Features(0b1011);
        assert_eq!(ours.agreed(Features(0b1110 | 1 << 63)), Features(0b1010));
        assert_eq!(ours.first_missing(Features(0b0011)), None);
        assert_eq!(ours.first_missing(Features(0b0100 | 1 << 63)), Some(2));
        assert_eq!(ours.first_missing(Features(1 << 63)), Some(63));
    }

    #[test]
    fn every_feature_has_a_number_of_its_own() {
        let bits = Features::NAMED.iter().fold(0, |bits, (number, name)| {
            assert_eq!(bits & 1 << number, 0, "{name} has the number of another feature");
            bits | 1 << number
        });
        assert_eq!(Features(bits), Features::ALL);
    }
}
