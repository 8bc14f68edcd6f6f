//! Events as TensorBoard reads them: one summary, or the version of the file.

use super::error::SummaryError;
use super::histogram::SummaryHistogram;
use super::hyperparameters::{Hyperparameters, RunStatus};
use super::image::SummaryImage;
use super::json_line::JsonLine;
use super::protobuf_writer::ProtobufWriter;

/// One summary of one step, before it is encoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SummaryEvent<'a> {
    /// The time in seconds since 1970.
    pub(crate) wall_time_s: f64,
    /// At most 2^63 - 1.
    pub(crate) step: u64,
    pub(crate) tag: &'a str,
    pub(crate) value: SummaryValue<'a>,
}

/// The value that a summary shows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SummaryValue<'a> {
    Scalar(f64),
    Histogram(&'a SummaryHistogram),
    /// A text in Markdown.
    Text(&'a str),
    Image(&'a SummaryImage),
    /// Names, types and metrics of the HPARAMS tab.
    Experiment(&'a Hyperparameters),
    /// The values of one run.
    RunStart(&'a Hyperparameters),
    RunEnd(RunStatus),
}

impl SummaryEvent<'_> {
    /// Checks that TensorBoard can read the event.
    pub(crate) fn check(&self) -> Result<(), SummaryError> {
        let bytes = self.tag.len();
        if bytes == 0 || bytes > TAG_BYTES_MAX {
            return Err(SummaryError::Tag { bytes, bytes_max: TAG_BYTES_MAX });
        }
        if self.step > STEP_MAX {
            return Err(SummaryError::Step { step: self.step });
        }
        let bytes = match self.value {
            SummaryValue::Histogram(histogram) => 16 * histogram.limits().len(),
            SummaryValue::Text(text) => text.len(),
            SummaryValue::Image(image) => image.png().len(),
            SummaryValue::Experiment(settings) | SummaryValue::RunStart(settings) => {
                settings.check()?;
                settings.text_bytes()
            }
            SummaryValue::Scalar(_) | SummaryValue::RunEnd(_) => 0,
        };
        if bytes > SUMMARY_BYTES_MAX {
            let tag = self.tag.to_owned();
            return Err(SummaryError::TooLarge { tag, bytes, bytes_max: SUMMARY_BYTES_MAX });
        }
        Ok(())
    }

    /// Encodes an `Event` of `event.proto`.
    pub(crate) fn encode(&self, event: &mut ProtobufWriter) {
        event.double(1, self.wall_time_s);
        event.integer(2, self.step);
        event.message(5, |summary| {
            summary.message(1, |value| {
                value.text(1, self.tag);
                self.encode_value(value);
            });
        });
    }

    /// Encodes a field of `Summary.Value`. Scalars, histograms and images have the classic form,
    /// which is the shortest; the others exist only as tensors that a plugin reads.
    fn encode_value(&self, value: &mut ProtobufWriter) {
        match self.value {
            SummaryValue::Scalar(number) => value.float(2, number as f32),
            SummaryValue::Histogram(histogram) => {
                value.message(5, |message| encode_histogram(histogram, message));
            }
            SummaryValue::Image(image) => value.message(4, |message| encode_image(image, message)),
            SummaryValue::Text(text) => {
                encode_metadata(value, "text", &[]);
                value.message(8, |tensor| {
                    tensor.integer(1, DT_STRING);
                    tensor.message(2, |_| ());
                    tensor.text(8, text);
                });
            }
            SummaryValue::Experiment(_) | SummaryValue::RunStart(_) | SummaryValue::RunEnd(_) => {
                let mut content = ProtobufWriter::default();
                self.encode_hyperparameters(&mut content);
                encode_metadata(value, "hparams", content.bytes());
                // The plugin wants a tensor, and reads nothing of it: an empty vector.
                value.message(8, |tensor| {
                    tensor.integer(1, DT_FLOAT);
                    tensor
                        .message(2, |shape| shape.message(2, |dimension| dimension.integer(1, 0)));
                });
            }
        }
    }

    /// Encodes a field of `HParamsPluginData`.
    fn encode_hyperparameters(&self, content: &mut ProtobufWriter) {
        match self.value {
            SummaryValue::Experiment(settings) => {
                content.message(2, |message| settings.encode_experiment(message, self.wall_time_s));
            }
            SummaryValue::RunStart(settings) => {
                content.message(3, |message| settings.encode_start(message, self.wall_time_s));
            }
            SummaryValue::RunEnd(status) => content.message(4, |message| {
                message.integer(1, status.code());
                message.double(2, self.wall_time_s);
            }),
            _ => {}
        }
    }

    /// Adds the fields of the JSON form.
    pub(crate) fn describe(&self, line: &mut JsonLine) {
        line.number("wall_time", self.wall_time_s);
        line.integer("step", self.step);
        line.string("tag", self.tag);
        line.string("kind", self.value.kind());
        match self.value {
            SummaryValue::Scalar(number) => line.number("value", number),
            SummaryValue::Text(text) => line.string("value", text),
            SummaryValue::Histogram(histogram) => {
                line.number("count", histogram.count());
                line.integer("non_finite", histogram.non_finite());
                line.number("min", histogram.min());
                line.number("max", histogram.max());
                line.number("sum", histogram.sum());
                line.number("sum_squares", histogram.sum_squares());
                line.numbers("limits", histogram.limits());
                line.numbers("counts", histogram.counts());
            }
            SummaryValue::Image(image) => {
                line.integer("width", image.width().into());
                line.integer("height", image.height().into());
                line.integer("bytes", image.png().len() as u64);
            }
            SummaryValue::Experiment(settings) | SummaryValue::RunStart(settings) => {
                line.object("value", |line| settings.describe(line));
            }
            SummaryValue::RunEnd(status) => line.string("value", status.name()),
        }
    }
}

impl SummaryValue<'_> {
    fn kind(&self) -> &'static str {
        match self {
            SummaryValue::Scalar(_) => "scalar",
            SummaryValue::Histogram(_) => "histogram",
            SummaryValue::Text(_) => "text",
            SummaryValue::Image(_) => "image",
            SummaryValue::Experiment(_) => "experiment",
            SummaryValue::RunStart(_) => "run_start",
            SummaryValue::RunEnd(_) => "run_end",
        }
    }
}

/// Encodes the first event of every file, which names its format.
pub(crate) fn encode_file_version(event: &mut ProtobufWriter, wall_time_s: f64) {
    event.double(1, wall_time_s);
    event.text(3, "brain.Event:2");
}

/// Encodes a `HistogramProto`. Empty buckets at both ends are left out: TensorBoard takes minimum
/// and maximum as the outer limits, and one of its readers shows an empty bucket there whose limits
/// are in the wrong order.
fn encode_histogram(histogram: &SummaryHistogram, message: &mut ProtobufWriter) {
    message.double(1, histogram.min());
    message.double(2, histogram.max());
    message.double(3, histogram.count());
    message.double(4, histogram.sum());
    message.double(5, histogram.sum_squares());
    let filled = histogram.filled();
    message.doubles(6, &histogram.limits()[filled.clone()]);
    message.doubles(7, &histogram.counts()[filled]);
}

/// Encodes an image as a `Summary.Image` message.
fn encode_image(image: &SummaryImage, message: &mut ProtobufWriter) {
    message.integer(1, image.height().into());
    message.integer(2, image.width().into());
    message.integer(3, image.channels().into());
    message.text(4, image.png());
}

/// Encodes a `SummaryMetadata` for a plugin that reads tensors.
fn encode_metadata(value: &mut ProtobufWriter, plugin: &str, content: &[u8]) {
    value.message(9, |metadata| {
        metadata.message(1, |data| {
            data.text(1, plugin);
            data.text(2, content);
        });
        metadata.integer(4, DATA_CLASS_TENSOR);
    });
}

/// The largest step that the format has.
const STEP_MAX: u64 = i64::MAX as u64;

/// The most bytes of a tag.
const TAG_BYTES_MAX: usize = 4096;

/// The largest summary. TensorBoard keeps in memory what it shows.
const SUMMARY_BYTES_MAX: usize = 256 << 20;

/// Element types of `types.proto`.
const DT_FLOAT: u64 = 1;
const DT_STRING: u64 = 7;

/// The data class of `summary.proto` for tensors.
const DATA_CLASS_TENSOR: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::image::tests::WHITE;

    fn encoded(tag: &str, value: SummaryValue<'_>) -> Vec<u8> {
        let mut bytes = ProtobufWriter::default();
        SummaryEvent { wall_time_s: 1.0, step: 300, tag, value }.encode(&mut bytes);
        bytes.bytes().to_vec()
    }

    fn described(value: SummaryValue<'_>) -> String {
        let mut line = JsonLine::new();
        SummaryEvent { wall_time_s: 1.5, step: 3, tag: "t", value }.describe(&mut line);
        line.finish()
    }

    /// Wall time 1 and step 300.
    const HEAD: &[u8] = b"\x09\0\0\0\0\0\0\xf0\x3f\x10\xac\x02";

    #[test]
    fn the_first_event_names_the_format() {
        let mut event = ProtobufWriter::default();
        encode_file_version(&mut event, 1.0);
        assert_eq!(event.bytes(), b"\x09\0\0\0\0\0\0\xf0\x3f\x1a\x0dbrain.Event:2");
        assert_eq!(event.bytes().len(), 24);
    }

    #[test]
    fn the_bytes_of_a_scalar_are_known() {
        let body = b"\x2a\x0d\x0a\x0b\x0a\x04loss\x15\0\0\0\x3f";
        assert_eq!(encoded("loss", SummaryValue::Scalar(0.5)), [HEAD, body].concat());
    }

    #[test]
    fn the_bytes_of_a_text_are_known() {
        let value = [
            &b"\x0a\x01t"[..],
            b"\x4a\x0c\x0a\x08\x0a\x04text\x12\0\x20\x02",
            b"\x42\x08\x08\x07\x12\0\x42\x02hi",
        ]
        .concat();
        let body = [&b"\x2a\x1d\x0a\x1b"[..], &value].concat();
        assert_eq!(encoded("t", SummaryValue::Text("hi")), [HEAD, &body].concat());
    }

    #[test]
    fn the_bytes_of_an_image_are_known() {
        let image = SummaryImage::from_png(WHITE).unwrap();
        let image = encoded("t", SummaryValue::Image(&image));
        let at = HEAD.len();
        assert_eq!(
            image[at..at + 17],
            *b"\x2a\x52\x0a\x50\x0a\x01t\x22\x4b\x08\x01\x10\x01\x18\x01\x22\x43"
        );
        assert_eq!(&image[at + 17..], WHITE);
    }

    #[test]
    fn the_bytes_of_a_histogram_are_known() {
        let histogram = SummaryHistogram::of([0.0, 0.0]);
        let zeros = [0; 8];
        let value = [
            &b"\x0a\x01t\x2a\x41"[..],
            b"\x09",
            &zeros,
            b"\x11",
            &zeros,
            b"\x19",
            &2.0_f64.to_le_bytes(),
            b"\x21",
            &zeros,
            b"\x29",
            &zeros,
            // Both are between 0 and 1e-12.
            b"\x32\x08",
            &1e-12_f64.to_le_bytes(),
            b"\x3a\x08",
            &2.0_f64.to_le_bytes(),
        ]
        .concat();
        let body = [&b"\x2a\x48\x0a\x46"[..], &value].concat();
        assert_eq!(encoded("t", SummaryValue::Histogram(&histogram)), [HEAD, &body].concat());
    }

    #[test]
    fn the_bytes_of_hyperparameters_are_known() {
        let settings = Hyperparameters::new().set("lr", 0.5).set("o", "sgd").set("s", true);
        let settings = settings.metric("loss").group("g");
        let one = 1.0_f64.to_le_bytes();
        let table = [
            (
                SummaryValue::Experiment(&settings),
                [
                    &b"\x12\x29\x19"[..],
                    &one,
                    b"\x22\x06\x0a\x02lr\x20\x03\x22\x05\x0a\x01o\x20\x01\x22\x05\x0a\x01s\x20\x02",
                    b"\x2a\x08\x0a\x06\x12\x04loss",
                ]
                .concat(),
            ),
            (
                SummaryValue::RunStart(&settings),
                [
                    &b"\x1a\x32\x0a\x0f\x0a\x02lr\x12\x09\x11"[..],
                    &0.5_f64.to_le_bytes(),
                    b"\x0a\x0a\x0a\x01o\x12\x05\x1a\x03sgd\x0a\x07\x0a\x01s\x12\x02\x20\x01",
                    b"\x22\x01g\x29",
                    &one,
                ]
                .concat(),
            ),
            (
                SummaryValue::RunEnd(RunStatus::Failure),
                [&b"\x22\x0b\x08\x02\x11"[..], &one].concat(),
            ),
        ];
        for (value, content) in table {
            let mut event = ProtobufWriter::default();
            SummaryEvent { wall_time_s: 1.0, step: 0, tag: "t", value }
                .encode_hyperparameters(&mut event);
            assert_eq!(event.bytes(), content, "{value:?}");
            let event = encoded("t", value);
            assert!(event.windows(content.len()).any(|window| window == content));
            assert!(event.ends_with(b"\x42\x08\x08\x01\x12\x04\x12\x02\x08\0"), "an empty vector");
        }
    }

    #[test]
    fn what_the_format_lacks_is_refused() {
        let check = |tag: &str, step, value| {
            let event = SummaryEvent { wall_time_s: 1.0, step, tag, value };
            event.check().map_err(|error| error.to_string())
        };
        let scalar = SummaryValue::Scalar(0.5);
        assert_eq!(check(&"t".repeat(TAG_BYTES_MAX), STEP_MAX, scalar), Ok(()));
        let nan = Hyperparameters::new().set("rate", f64::NAN);
        let long = " ".repeat(SUMMARY_BYTES_MAX + 1);
        let table = [
            (check("", 0, scalar), "with a tag of 0 bytes"),
            (check(&"t".repeat(TAG_BYTES_MAX + 1), 0, scalar), "with a tag of 4097 bytes"),
            (check("t", STEP_MAX + 1, scalar), "of step 9223372036854775808"),
            (check("t", 0, SummaryValue::Text(&long)), "\"t\" of 268435457 bytes"),
            (check("t", 0, SummaryValue::RunStart(&nan)), "\"rate\": NaN is not finite"),
        ];
        for (checked, part) in table {
            let text = checked.unwrap_err();
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_json_forms_are_known() {
        let histogram = SummaryHistogram::of([0.0, f64::NAN]);
        let image = SummaryImage::from_png(WHITE).unwrap();
        let settings = Hyperparameters::new().set("lr", 0.5).set("o", "sgd").set("s", true);
        let table = [
            (SummaryValue::Scalar(f64::NAN), r#""kind":"scalar","value":"NaN""#),
            (SummaryValue::Text("a\nb"), r#""kind":"text","value":"a\nb""#),
            (SummaryValue::Image(&image), r#""kind":"image","width":1,"height":1,"bytes":67"#),
            (
                SummaryValue::Histogram(&histogram),
                concat!(
                    r#""kind":"histogram","count":1,"non_finite":1,"min":0,"max":0,"sum":0,"#,
                    r#""sum_squares":0,"limits":[0,1e-12,1.7976931348623157e308],"counts":[0,1,0]"#
                ),
            ),
            (
                SummaryValue::RunStart(&settings),
                r#""kind":"run_start","value":{"lr":0.5,"o":"sgd","s":true}"#,
            ),
            (SummaryValue::RunEnd(RunStatus::Success), r#""kind":"run_end","value":"success""#),
        ];
        for (value, body) in table {
            let expected = format!("{{\"wall_time\":1.5,\"step\":3,\"tag\":\"t\",{body}}}\n");
            assert_eq!(described(value), expected);
        }
    }
}
